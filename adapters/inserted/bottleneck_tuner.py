"""The PEFT tuner of bottleneck adapters, whose networks work through forward hooks.

No module of the backbone is replaced: each network is a child of the module that it changes. So that module may be
stored in any format, and with the adapter off nothing differs.

Shapes: B batch, L sequence, D hidden; a flat [B * L, D] and pictures' patches work as well.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.activations import ACT2FN

from workbench.adapters.anatomy import width_at
from workbench.adapters.peft_tuners import TunerConfig, UnmergeableTuner, register_tuner


class BottleneckLayer(nn.Module, BaseTunerLayer):
    """The networks of all adapters at one place; active ones work in their order.

    Args:
        changed: The module whose output changes, and whose child this is.
        read: The module whose input is read; only `beside` it differs from `changed`.
    """

    adapter_layer_names = ("bottleneck_down", "bottleneck_up")
    other_param_names = ("activations", "dropouts", "scales")

    def __init__(self, changed: nn.Module, read: nn.Module) -> None:
        super().__init__()
        self.bottleneck_down = nn.ModuleDict()
        self.bottleneck_up = nn.ModuleDict()
        self.activations = nn.ModuleDict()
        self.dropouts = nn.ModuleDict()
        self.scales: dict[str, float] = {}
        self.merged_adapters = []
        self.handles = self.hook(changed, read)

    @abstractmethod
    def hook(self, changed: nn.Module, read: nn.Module) -> list[RemovableHandle]:
        """Register the hooks of this layer."""

    def add(self, name: str, *, hidden: int, width: int, activation: str, scale: float, dropout: float) -> None:
        """Add an adapter. Its up-projection is zero, so that it adds nothing yet, and gets the first gradient."""
        down, up = nn.Linear(hidden, width), nn.Linear(width, hidden)
        nn.init.zeros_(down.bias)
        nn.init.zeros_(up.weight)
        nn.init.zeros_(up.bias)
        self.bottleneck_down[name], self.bottleneck_up[name] = down, up
        self.activations[name] = ACT2FN[activation]
        self.dropouts[name] = nn.Dropout(dropout)
        self.scales[name] = scale

    def working(self) -> list[str]:
        """Names of the adapters that change something now."""
        return [] if self.disable_adapters else [name for name in self.active_adapters if name in self.scales]

    def update(self, name: str, x_BLD: Tensor) -> Tensor:
        """A(x), computed in the precision of the adapter, returned in that of `x_BLD`."""
        down, up = self.bottleneck_down[name], self.bottleneck_up[name]
        bottleneck = self.activations[name](down(x_BLD.to(down.weight.dtype)))  # type: ignore[arg-type]
        added: Tensor = self.dropouts[name](up(bottleneck) * self.scales[name])
        return added.to(x_BLD.dtype)

    def remove(self) -> None:
        """Remove the hooks of this layer."""
        for handle in self.handles:
            handle.remove()


class SequentialBottleneck(BottleneckLayer):
    """y + A(y)."""

    def hook(self, changed: nn.Module, read: nn.Module) -> list[RemovableHandle]:
        return [changed.register_forward_hook(self._add)]

    def _add(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        y_BLD = hidden_of(output)
        for name in self.working():
            y_BLD = y_BLD + self.update(name, y_BLD)
        return with_hidden(output, y_BLD)


class NormalisedBottleneck(BottleneckLayer):
    """N(s + A(N(s))): the block's last normalisation N sees what is added."""

    def hook(self, changed: nn.Module, read: nn.Module) -> list[RemovableHandle]:
        return [changed.register_forward_hook(self._add)]

    def _add(self, norm: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        s_BLD = inputs[0]
        for name in self.working():
            s_BLD = s_BLD + self.update(name, output)
            output = norm.forward(s_BLD)  # not norm(...), which would come back here
        return output


class ParallelBottleneck(BottleneckLayer):
    """y + A(x), where x is the input of another module, which runs before."""

    def hook(self, changed: nn.Module, read: nn.Module) -> list[RemovableHandle]:
        self._read: Tensor | None = None
        return [read.register_forward_pre_hook(self._keep), changed.register_forward_hook(self._add)]

    def _keep(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._read = inputs[0] if self.working() else None

    def _add(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        x_BLD, self._read = self._read, None  # held no longer than needed
        if x_BLD is None:
            return output
        y_BLD = hidden_of(output)
        for name in self.working():
            y_BLD = y_BLD + self.update(name, x_BLD)
        return with_hidden(output, y_BLD)


KINDS: dict[str, type[BottleneckLayer]] = {
    "after": SequentialBottleneck,
    "within": NormalisedBottleneck,
    "beside": ParallelBottleneck,
}
"""Class of the layer, by the field of the configuration that lists its places."""
CHILD = "_bottleneck"
"""The child's name is a field and this; PEFT skips modules whose path contains the tuner's prefix."""


def hidden_of(output: Any) -> Tensor:
    """The hidden states in a module's output, alone or first of a tuple."""
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


def with_hidden(output: Any, hidden: Tensor) -> Any:
    """A module's output with other hidden states."""
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


@dataclass
class BottleneckConfig(TunerConfig):
    """Settings of a bottleneck adapter, and the paths of the modules that it changes."""

    width: int = 64
    """Units between the two projections."""
    activation: str = "relu"
    """A name of transformers' ACT2FN."""
    scale: float = 1.0
    """Factor of what is added."""
    dropout: float = 0.0
    """Share of what is added that is dropped while training."""
    after: list[str] = field(default_factory=list)
    """Modules whose output y becomes y + A(y)."""
    within: list[str] = field(default_factory=list)
    """Normalisations N of a sum s: N(s) becomes N(s + A(N(s)))."""
    beside: dict[str, str] = field(default_factory=dict)
    """Modules whose output y becomes y + A(x), with the module whose input x is."""
    trainable_token_indices: dict[str, list[int]] | None = None
    """Rows of embeddings that train beside."""

    @property
    def target_modules(self) -> tuple[str, ...]:
        """Every module that is changed. A tuple: PEFT shortens the names in a long list or set."""
        return (*self.after, *self.within, *self.beside)


class BottleneckModel(UnmergeableTuner):
    """Tuner of bottleneck adapters."""

    prefix = "bottleneck_"
    tuner_layer_cls = BottleneckLayer
    why = "a bottleneck adapter cannot be merged: no weight equals its activation. Keep backbone and adapter apart."

    def _prepare_model(self, peft_config: PeftConfig, model: nn.Module) -> None:
        assert isinstance(peft_config, BottleneckConfig)
        known = {name for name, _ in model.named_modules()}
        missing = [name for name in (*peft_config.target_modules, *peft_config.beside.values()) if name not in known]
        if missing:
            raise ValueError(f"{type(model).__name__} has no module {', '.join(missing[:4])}")

    def put(self, config: PeftConfig, name: str, target: nn.Module, path: str) -> None:
        assert isinstance(config, BottleneckConfig)
        kind = next(kind for kind in KINDS if path in getattr(config, kind))
        child = kind + CHILD
        layer = target._modules.get(child)
        if not isinstance(layer, BottleneckLayer):
            layer = KINDS[kind](target, self.model.get_submodule(config.beside.get(path, path)))
            target.add_module(child, layer)
        layer.add(
            name,
            hidden=width_at(self.model, path),
            width=config.width,
            activation=config.activation,
            scale=config.scale,
            dropout=config.dropout,
        )
        held = next(target.parameters()).device
        if next(layer.parameters()).device != torch.device("meta"):
            layer.to(held)


register_tuner("bottleneck", BottleneckConfig, BottleneckModel)
