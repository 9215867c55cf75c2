"""Another function in place of the one of transformers that computes the attention of a module.

transformers lets every attention module look its function up by a name in the module's configuration. A module that
gets a copy of its configuration with another name calls another function, and nothing else differs.

Legend: B batch, H heads, Q queries, K keys, W width of a head, P virtual tokens.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from workbench.adapters import anatomy, picture_tower

PREFIXED = "workbench_prefix"
"""The name under which transformers finds `attend`."""
LOOKING = "workbench_looking"
"""The name under which it finds a function that only notes which module calls."""
COMPUTED = ("eager", "sdpa")
"""Implementations of attention to which keys and values can be added."""

Attention = Callable[..., tuple[Tensor, Tensor | None]]
Sizes = tuple[int, int, int]
"""Heads of keys and values, width of a key, width of a value."""


def places(model: PreTrainedModel) -> dict[str, Sizes]:
    """Paths of the attention modules that a token, or a patch, passes, with the sizes of their keys and values.

    Empty where the backbone has none, or does not compute attention through transformers' functions. The
    backbone may be without weights.
    """
    if anatomy.reads_pictures(model):
        with _looking(model) as seen:
            return seen if picture_tower.reads(model) else {}
    embedding = model.get_input_embeddings()
    if not isinstance(embedding, nn.Embedding):
        return {}
    one = embedding(torch.zeros(1, 1, dtype=torch.int64, device=model.device))
    inputs = {"inputs_embeds": one}
    if model.config.is_encoder_decoder:
        inputs["decoder_inputs_embeds"] = one
    with _looking(model) as attention_sizes, torch.no_grad():
        model.base_model(**inputs)
    return attention_sizes


@contextmanager
def _looking(model: nn.Module) -> Iterator[dict[str, Sizes]]:
    """Inside, attention computes zeros, and the dictionary fills with the modules that ask for it."""
    modules = {id(module): (path, module) for path, module in model.named_modules() if _chooses(module)}
    sizes: dict[str, Sizes] = {}

    def look(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
        sizes[modules[id(module)][0]] = (key.shape[1], key.shape[3], value.shape[3])
        shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
        return value.new_zeros(shape), None

    AttentionInterface.register(LOOKING, look)
    kept = [(module, module.config) for _, module in modules.values()]
    training = model.training
    try:
        model.eval()
        for module, config in kept:
            module.config = renamed(config, LOOKING)
        yield sizes
    finally:
        model.train(training)
        for module, config in kept:
            module.config = config


def _chooses(module: nn.Module) -> bool:
    """Whether a module looks up how attention is computed; a whole model has the configuration for its parts."""
    config = vars(module).get("config")
    home = sys.modules[type(module).__module__]
    return (
        hasattr(config, "_attn_implementation")
        and hasattr(home, "ALL_ATTENTION_FUNCTIONS")
        and not any(isinstance(part, nn.ModuleList) or "config" in vars(part) for part in list(module.modules())[1:])
    )


def renamed(config: Any, name: str) -> Any:
    """A copy of a configuration that names another function; parts that it holds are shared, and stay as they are."""
    changed = copy.copy(config)
    changed._attn_implementation_internal = name
    return changed


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    position_bias: Tensor | None = None,
    **settings: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention to the virtual tokens of `module.prefix` and to the text, all of which sees all of them.

    Args:
        query: (B, H, Q, W).
        key: (B, H, K, W); `value` alike.
        attention_mask: True where, or what is added to scores so that, a query sees a key; None: all, or all before.
        position_bias: What T5 adds to scores; virtual tokens are at no position and get none.
    """
    layer: Any = module.prefix
    compute = _function(module, layer.implementation)
    given = layer.keys_and_values()
    biased = {} if position_bias is None else {"position_bias": position_bias}
    if given is None:
        return compute(module, query, key, value, attention_mask, **biased, **settings)
    causal_setting = settings.get("is_causal")
    causal = getattr(module, "is_causal", False) if causal_setting is None else causal_setting
    if attention_mask is None and causal and query.shape[2] > 1:
        attention_mask = _causal(query, key)
    more = given[0].shape[1]
    if attention_mask is not None:
        seen: Any = attention_mask.dtype == torch.bool
        attention_mask = F.pad(attention_mask, (more, 0), value=seen)
    if position_bias is not None:
        biased["position_bias"] = F.pad(position_bias, (more, 0))
    key, value = (
        torch.cat((added.to(text.dtype).expand(len(text), -1, -1, -1), text), dim=2)
        for added, text in zip(given, (key, value), strict=True)
    )
    return compute(module, query, key, value, attention_mask, **biased, **settings)


def _causal(query: Tensor, key: Tensor) -> Tensor:
    """True where a query sees a key: (1, 1, Q, K), the last query being at the last key."""
    seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=key.device)
    return seen.tril(key.shape[2] - query.shape[2])[None, None]


def _function(module: nn.Module, implementation: str) -> Attention:
    """The function that the backbone itself would call; each family has an eager one of its own."""
    own = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    attention_forward: Attention = AttentionInterface().get_interface(implementation, own)
    return attention_forward


AttentionInterface.register(PREFIXED, attend)
