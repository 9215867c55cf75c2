"""The PEFT tuner of bottleneck adapters: puts them onto a backbone, and takes them off."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from peft import PeftConfig
from torch import nn

from workbench.adapters.inserted.bottleneck_layers import CHILD, KINDS, BottleneckLayer
from workbench.adapters.inserted.bottleneck_places import width_at
from workbench.adapters.module_tuner import UnmergeableTuner
from workbench.adapters.peft_registration import TunerConfig, register_tuner


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
        """Every module that is changed. PEFT shortens a long list or set of names to their ends, but no tuple."""
        return (*self.after, *self.within, *self.beside)


class BottleneckModel(UnmergeableTuner):
    """Puts bottleneck networks onto a backbone, and takes them off."""

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

    def take_off(self, *, merge: bool) -> None:
        for module in list(self.model.modules()):
            for kind in KINDS:
                layer = module._modules.get(kind + CHILD)
                if isinstance(layer, BottleneckLayer):
                    layer.remove()
                    delattr(module, kind + CHILD)


register_tuner("bottleneck", BottleneckConfig, BottleneckModel)
