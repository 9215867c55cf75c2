"""Sizes of the keys and values that a causal backbone caches of each token, found by a forward pass.

The configurations of the families name these sizes in too many ways to read them there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from workbench.adapters import anatomy

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


class CacheSizes(NamedTuple):
    """Number and size of the keys that are cached of one token; the values are alike."""

    layers: int
    heads: int
    width: int


def sizes(model: PreTrainedModel) -> CacheSizes | None:
    """The sizes that a causal model caches of a token; it may be without weights.

    None where layers differ, where keys and values do (DeepSeek), or where nothing such is kept (Mamba, encoders).
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


def window(model: PreTrainedModel) -> int | None:
    """Number of tokens that a token sees, itself included, where every layer has a window; None where one has none."""
    config = model.config.get_text_config()
    full = "full_attention" in (getattr(config, "layer_types", None) or ())
    limit: int | None = getattr(config, "sliding_window", None)
    return None if full else limit


def _first_layer(model: PreTrainedModel) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Shapes of the keys and values that the first layer keeps of one token."""
    import torch
    from transformers import DynamicCache

    class ShapeProbe(DynamicCache):
        def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            raise _Seen(tuple(key_states.shape), tuple(value_states.shape))

    # Embeddings and no mask: without weights, nobody may look at values.
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
