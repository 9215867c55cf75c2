"""The PEFT tuner of prefixes in encoders: trainable keys and values that each attention module sees before the text.

PEFT's own prefix tuning stands in the key-value cache, which an encoder does not have. This one stands in the attention
itself, so it takes no positions, and activations can be recomputed. transformers lets every attention module look its
function up by a name in the module's configuration: a module that gets a copy of its configuration with another name
calls another function, and nothing else differs.

Legend: B batch, H heads, Q queries, K keys, P virtual tokens, W width of a head, N network's hidden width.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from workbench.adapters import anatomy
from workbench.adapters.peft_tuners import OwnForm, TunerConfig, UnmergeableTuner, register_tuner

PREFIXED = "workbench_prefix"
"""The name of `attend` in transformers' registry."""
LOOKING = "workbench_looking"
"""The name of a function that only records which module calls it."""
COMPUTED = ("eager", "sdpa")
"""Attention backends to which keys and values can be added."""

Attention = Callable[..., tuple[Tensor, Tensor | None]]
AttentionSizes = tuple[int, int, int]
"""Heads of keys and values, width of a key, width of a value."""


def attention_sizes(model: PreTrainedModel) -> dict[str, AttentionSizes]:
    """Paths of the attention modules that a token or a patch passes, with the sizes of their keys and values.

    Empty where the backbone has none, or does not compute attention through transformers' functions. Works on the meta
    device, too.
    """
    if anatomy.reads_pictures(model):
        with _looking(model) as seen:
            return seen if anatomy.reads_size(model) else {}
    if not anatomy.reads_tokens(model):
        return {}
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
def _looking(model: nn.Module) -> Iterator[dict[str, AttentionSizes]]:
    """Let attention return zeros inside the block, and record the modules that call it in the dictionary."""
    modules = {id(module): (path, module) for path, module in model.named_modules() if _chooses(module)}
    sizes: dict[str, AttentionSizes] = {}

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
    """Whether a module looks up its attention function; modules with configured parts hold the config for these."""
    config = vars(module).get("config")
    home = sys.modules[type(module).__module__]
    return (
        hasattr(config, "_attn_implementation")
        and hasattr(home, "ALL_ATTENTION_FUNCTIONS")
        and not any(isinstance(part, nn.ModuleList) or "config" in vars(part) for part in list(module.modules())[1:])
    )


def renamed(config: Any, name: str) -> Any:
    """A shallow copy of a configuration that names another attention function."""
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
    """Attention to the text and to the virtual tokens of `module.prefix`, which every query sees.

    Args:
        query: (B, H, Q, W).
        key: (B, H, K, W); `value` alike.
        attention_mask: Boolean (True: a query sees a key) or added to scores; None: all keys, or all earlier ones.
        position_bias: Added to scores by T5; 0 for virtual tokens, which have no position.
    """
    layer: Any = module.prefix
    own = vars(sys.modules[type(module).__module__])["eager_attention_forward"]  # each family has one of its own
    compute: Attention = AttentionInterface().get_interface(layer.implementation, own)
    given = layer.keys_and_values()
    biased = {} if position_bias is None else {"position_bias": position_bias}
    if given is None:
        return compute(module, query, key, value, attention_mask, **biased, **settings)
    causal_setting = settings.get("is_causal")
    causal = getattr(module, "is_causal", False) if causal_setting is None else causal_setting
    if attention_mask is None and causal and query.shape[2] > 1:
        seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=key.device)
        attention_mask = seen.tril(key.shape[2] - query.shape[2])[None, None]  # the last query is at the last key
    more = given[0].shape[1]
    if attention_mask is not None:
        attention_mask = F.pad(attention_mask, (more, 0), value=attention_mask.dtype == torch.bool)
    if position_bias is not None:
        biased["position_bias"] = F.pad(position_bias, (more, 0))
    key, value = (
        torch.cat((added.to(text.dtype).expand(len(text), -1, -1, -1), text), dim=2)
        for added, text in zip(given, (key, value), strict=True)
    )
    return compute(module, query, key, value, attention_mask, **biased, **settings)


AttentionInterface.register(PREFIXED, attend)


CHILD = "prefix"
"""The name of the layer inside its attention module."""


@dataclass
class AttentionPrefixConfig(TunerConfig):
    """Number of virtual tokens, and the attention modules that see them."""

    virtual_tokens: int = 20
    """Number of keys, and of values, before those of the text."""
    network_width: int | None = None
    """Hidden width of the network that computes them in training; None: they train as they are, or are saved."""
    sizes: dict[str, list[int]] = field(default_factory=dict)
    """Paths of the attention modules, with the number of heads and the widths of a key and of a value."""

    @property
    def target_modules(self) -> tuple[str, ...]:
        """Every attention module. A tuple: PEFT shortens the names in a long list or set."""
        return tuple(self.sizes)


class Vectors(nn.Module):
    """Keys (H, P, W) and values, trained as they are; drawn from a standard normal distribution."""

    def __init__(self, tokens: int, sizes: AttentionSizes) -> None:
        super().__init__()
        heads, *widths = sizes
        self.keys, self.values = (nn.Parameter(torch.randn(heads, tokens, width)) for width in widths)

    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        return self.keys, self.values


class Network(nn.Module):
    """Keys and values computed from an embedding of each virtual token (Li & Liang 2021, section 4.3)."""

    def __init__(self, tokens: int, sizes: AttentionSizes, width: int) -> None:
        super().__init__()
        self.tokens, self.sizes = tokens, sizes
        heads, *widths = sizes
        self.embedding = nn.Embedding(tokens, heads * widths[0])
        self.hidden = nn.Linear(heads * widths[0], width)
        self.output = nn.Linear(width, heads * sum(widths))

    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        heads, *widths = self.sizes
        both = self.output(torch.tanh(self.hidden(self.embedding.weight)))
        keys, values = both.view(self.tokens, heads, -1).transpose(0, 1).split(widths, dim=-1)
        return keys, values


class PrefixLayer(nn.Module, BaseTunerLayer):
    """The prefixes of all adapters at one attention module; it is the module's child.

    Args:
        owner: The attention module.
    """

    adapter_layer_names = ("attention_prefix_parts",)

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self.attention_prefix_parts = nn.ModuleDict()
        self.merged_adapters = []
        self.original: Any = owner.config
        # In a tuple, because a module that is an attribute becomes a child.
        self._owner = (owner,)
        owner.config = renamed(self.original, PREFIXED)

    @property
    def implementation(self) -> str:
        """Name of the backbone's own implementation of attention."""
        name: str = self.original._attn_implementation
        return name

    def keys_and_values(self) -> tuple[Tensor, Tensor] | None:
        """Keys (H, P, W) and values of the active adapters, one after the other; None where none is active."""
        names = [] if self.disable_adapters else self.active_adapters
        parts: list[Any] = [self.attention_prefix_parts[name] for name in names if name in self.attention_prefix_parts]
        if not parts:
            return None
        keys, values = zip(*(part.keys_and_values() for part in parts), strict=True)
        return torch.cat(keys, dim=1), torch.cat(values, dim=1)

    def remove(self) -> None:
        """Give the attention module its own function back."""
        (owner,) = self._owner
        owner.config = self.original


class AttentionPrefixModel(OwnForm, UnmergeableTuner):
    """Puts prefixes onto the attention modules of a backbone, and takes them off; ships keys and values alone."""

    prefix = "attention_prefix_"
    tuner_layer_cls = PrefixLayer
    why = "a prefix cannot be merged: virtual tokens are no update of weights. Keep them apart."

    def shipped(self, name: str, tensors: dict[str, Tensor]) -> tuple[PeftConfig, dict[str, Tensor]]:
        """Keys and values in place of the network that computes them."""
        config: Any = copy.copy(self.peft_config[name])
        config.network_width = None
        for path, layer in self.named_modules():
            if isinstance(layer, PrefixLayer) and isinstance(part := layer.attention_prefix_parts[name], Network):
                stem = f"base_model.{path}.attention_prefix_parts.{name}."
                tensors = {key: each for key, each in tensors.items() if not key.startswith(stem)}
                with torch.no_grad():
                    keys, values = part.keys_and_values()
                tensors |= {f"{stem}keys": keys.contiguous(), f"{stem}values": values.contiguous()}
        return config, tensors

    def _prepare_model(self, peft_config: PeftConfig, model: nn.Module) -> None:
        assert isinstance(peft_config, AttentionPrefixConfig)
        own_sizes = attention_sizes(model)  # type: ignore[arg-type]
        if own_sizes != {path: tuple(sizes) for path, sizes in peft_config.sizes.items()}:
            raise ValueError(
                f"Its virtual tokens were made for other attention modules than {type(model).__name__} has."
            )

    def put(self, config: PeftConfig, name: str, target: nn.Module, path: str) -> None:
        assert isinstance(config, AttentionPrefixConfig)
        layer = target._modules.get(CHILD)
        if not isinstance(layer, PrefixLayer):
            layer = PrefixLayer(target)
            target.add_module(CHILD, layer)
        heads, key_width, value_width = config.sizes[path]
        sizes = (heads, key_width, value_width)
        tokens, width = config.virtual_tokens, config.network_width
        part = Vectors(tokens, sizes) if width is None else Network(tokens, sizes, width)
        held = next(target.parameters()).device
        layer.attention_prefix_parts[name] = part if held.type == "meta" else part.to(held)
        layer.set_adapter(self.active_adapters, inference_mode=config.inference_mode)


register_tuner("attention_prefix", AttentionPrefixConfig, AttentionPrefixModel)
