"""Virtual tokens, which stand before each row for its text to see: the base of prompts and prefixes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import PositiveInt

from workbench.adapters import anatomy
from workbench.adapters.method import Method
from workbench.schema import Unit

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor
    from transformers import PreTrainedModel


class CacheSizes(NamedTuple):
    """Number and size of the cached keys of one token; values have the same."""

    layers: int
    heads: int
    width: int


def cache_sizes(model: PreTrainedModel) -> CacheSizes | None:
    """Sizes of the keys and values that a causal backbone caches for each token, found by a forward pass.

    The families' configurations name these sizes in too many ways to read them there. Works on the meta device, too.
    None where layers differ, where keys and values differ (DeepSeek), or where nothing is cached (Mamba, encoders).
    """
    import inspect

    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if model._is_stateful or config.is_heterogeneous or kinds - {"full_attention", "sliding_attention"}:
        return None
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        return None
    seen = _first_layer(model)
    if seen is None or seen[0] != seen[1]:
        return None
    return CacheSizes(len(anatomy.blocks(model)[0]), seen[0][1], seen[0][3])


def attention_window(model: PreTrainedModel) -> int | None:
    """Number of tokens that a token sees, itself included, if every layer has a sliding window; otherwise None."""
    config = model.config.get_text_config()
    full = "full_attention" in (getattr(config, "layer_types", None) or ())
    limit: int | None = getattr(config, "sliding_window", None)
    return None if full else limit


def _first_layer(model: PreTrainedModel) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Shapes of the keys and values that the first layer caches for one token."""
    import torch
    from transformers import DynamicCache

    class ShapeProbe(DynamicCache):
        def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            raise _Seen(tuple(key_states.shape), tuple(value_states.shape))

    # Embeddings and no mask: on the meta device, no value may be read.
    one = model.get_input_embeddings()(torch.zeros(1, 1, dtype=torch.int64, device=model.device))
    try:
        with torch.no_grad():
            model(inputs_embeds=one, past_key_values=ShapeProbe(), use_cache=True)
    except _Seen as seen:
        keys, values = seen.args
        return keys, values
    return None


class _Seen(Exception):
    """Ends the forward pass at the first keys and values."""


NO_MERGE = "virtual tokens are no update of its weights"


class VirtualTokens(Method):
    """Base of the methods that put trainable tokens before each row."""

    virtual_tokens: Annotated[PositiveInt, Unit("tokens")] = 20
    """Number of virtual tokens before each row. They take memory, time and (except as prefixes in attention modules)
    positions of the backbone."""

    def extra_positions(self, model: PreTrainedModel) -> int:
        """Number of virtual tokens; 0 beside patches, where they have no position."""
        return 0 if anatomy.reads_pictures(model) else self.virtual_tokens

    def refusal(self, model: PreTrainedModel) -> str | None:
        """Refuse a model that writes no text, where PEFT cannot switch virtual tokens off."""
        if anatomy.task(model) in ("CAUSAL_LM", "SEQ_2_SEQ_LM"):
            return None
        return (
            f"virtual tokens work on models that write text; on {type(model).__name__} PEFT has none, or cannot "
            "switch them off. Use adapter.method=lora."
        )


def require_fitting(model: PeftModel, name: str) -> None:
    """Check that the virtual tokens loaded as `name` fit the backbone; PEFT fails only in the first forward pass.

    Raises:
        ValueError: They do not fit.
    """
    from peft import PrefixTuningConfig
    from peft.config import PromptLearningConfig

    config = model.peft_config[name]
    if not isinstance(config, PromptLearningConfig):
        return
    backbone: Any = model.get_base_model()
    if isinstance(config, PrefixTuningConfig):
        own = cache_sizes(backbone)
        asked = (config.num_layers, config.num_attention_heads, config.token_dim)
        fits = own is not None and asked == (own.layers, own.heads, own.heads * own.width)
        made = f"{config.num_layers} layers of {config.num_attention_heads} heads, {config.token_dim} wide in all"
        follow_precision(model)
    else:
        fits = config.token_dim == embedding_width(backbone)
        made = f"embeddings {config.token_dim} wide"
    if not fits:
        raise ValueError(f"Its virtual tokens were made for {made}.")


def follow_precision(model: PeftModel) -> None:
    """Compute a prefix in the precision of the backbone's keys and values.

    PEFT takes the precision of the first parameter, in which it may only be stored.
    """
    import torch

    computed = model.get_input_embeddings()(torch.zeros(1, 1, dtype=torch.int64, device=model.device)).dtype
    kind = type(model)
    model.__class__ = type(kind.__name__, (kind,), {"base_model_torch_dtype": computed})


def embedding_width(model: PreTrainedModel) -> int:
    """Size of a token's embedding, which is not the hidden size everywhere."""
    embedding: Any = model.get_input_embeddings()
    width: int = embedding.weight.shape[1]
    return width
