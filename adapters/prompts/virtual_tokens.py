"""Virtual tokens, which stand before each row for its text to see: the base of prompts and prefixes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import PositiveInt

from workbench.adapters import anatomy
from workbench.adapters.method import Method
from workbench.adapters.prompts import attention_cache
from workbench.schema import Unit

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

NO_MERGE = "virtual tokens are no update of its weights"


class VirtualTokens(Method):
    """Base of the methods that put trainable tokens before each row."""

    virtual_tokens: Annotated[PositiveInt, Unit("tokens")] = 20
    """Number of virtual tokens before each row. They take memory, time, and, but for prefixes in attention
    modules, positions of the backbone."""

    def extra_positions(self, model: PreTrainedModel) -> int:
        """Number of virtual tokens; none beside patches, where they are at no position."""
        return 0 if anatomy.reads_pictures(model) else self.virtual_tokens

    def refusal(self, model: PreTrainedModel) -> str | None:
        """Refuse a model that writes no text, where PEFT cannot switch virtual tokens off."""
        if anatomy.task(model) in ("CAUSAL_LM", "SEQ_2_SEQ_LM"):
            return None
        return (
            f"virtual tokens work on models that write text; on {type(model).__name__} PEFT has none, or cannot "
            "switch them off. Use adapter.method=lora."
        )


def settle(model: PeftModel, name: str) -> None:
    """Check that the virtual tokens loaded as `name` fit the backbone; PEFT fails only in the first forward pass.

    Raises:
        ValueError: they do not.
    """
    from peft import PrefixTuningConfig
    from peft.config import PromptLearningConfig

    config = model.peft_config[name]
    if not isinstance(config, PromptLearningConfig):
        return
    backbone: Any = model.get_base_model()
    if isinstance(config, PrefixTuningConfig):
        cache_sizes = attention_cache.sizes(backbone)
        fits = cache_sizes is not None and (config.num_layers, config.num_attention_heads, config.token_dim) == (
            cache_sizes.layers,
            cache_sizes.heads,
            cache_sizes.heads * cache_sizes.width,
        )
        made = f"{config.num_layers} layers of {config.num_attention_heads} heads, {config.token_dim} wide in all"
        follow_precision(model)
    else:
        fits = config.token_dim == embedding_width(backbone)
        made = f"embeddings {config.token_dim} wide"
    if not fits:
        raise ValueError(f"Its virtual tokens were made for {made}.")


def follow_precision(model: PeftModel) -> None:
    """Give a prefix the precision of the keys and values that it stands beside.

    PEFT takes that of the first parameter, which may only be stored in it.
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
