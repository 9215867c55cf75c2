"""The PEFT tuner of prefixes in encoders: trainable keys and values that each attention module sees before the text.

PEFT's own prefix tuning stands in the key-value cache, which an encoder does not have. This one stands in the attention
itself, so it takes no positions, and activations can be recomputed.

Legend: H heads, P virtual tokens, W width of a head, N network's hidden width.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from workbench.adapters.export_form import OwnForm
from workbench.adapters.module_tuner import UnmergeableTuner
from workbench.adapters.peft_registration import TunerConfig, register_tuner
from workbench.adapters.prompts import attention_calls
from workbench.adapters.prompts.attention_calls import Sizes

CHILD = "prefix"
"""The name of the layer inside its attention module."""


@dataclass
class AttentionPrefixConfig(TunerConfig):
    """Number of virtual tokens, and the attention modules that see them."""

    virtual_tokens: int = 20
    """Keys, and values, before those of the text."""
    network_width: int | None = None
    """Hidden width of the network that computes them in training; None: they are trained, or shipped, as they are."""
    sizes: dict[str, list[int]] = field(default_factory=dict)
    """Paths of the attention modules, with the number of heads and the widths of a key and of a value."""

    @property
    def target_modules(self) -> tuple[str, ...]:
        """Every attention module. PEFT shortens a long list or set of names to their ends, but no tuple."""
        return tuple(self.sizes)


class Vectors(nn.Module):
    """Keys (H, P, W) and values, trained as they are; drawn from a standard normal distribution."""

    def __init__(self, tokens: int, sizes: Sizes) -> None:
        super().__init__()
        heads, *widths = sizes
        self.keys, self.values = (nn.Parameter(torch.randn(heads, tokens, width)) for width in widths)

    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        return self.keys, self.values


class Network(nn.Module):
    """Keys and values computed from an embedding of each virtual token (Li & Liang 2021, section 4.3)."""

    def __init__(self, tokens: int, sizes: Sizes, width: int) -> None:
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
    """The prefixes of all named adapters at one attention module, as whose child it stands.

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
        owner.config = attention_calls.renamed(self.original, attention_calls.PREFIXED)

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
        """Leave the attention module as it was."""
        (owner,) = self._owner
        owner.config = self.original
        delattr(owner, CHILD)


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
        attention_sizes = attention_calls.places(model)  # type: ignore[arg-type]
        if attention_sizes != {path: tuple(sizes) for path, sizes in peft_config.sizes.items()}:
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

    def take_off(self, *, merge: bool) -> None:
        for layer in [module for module in self.model.modules() if isinstance(module, PrefixLayer)]:
            layer.remove()


register_tuner("attention_prefix", AttentionPrefixConfig, AttentionPrefixModel)
