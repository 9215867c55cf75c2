"""Principal components of the inputs of layers, found in one pass over data, from which EVA starts LoRA.

Legend: N tokens, I inputs, K components.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from peft import EvaConfig, PeftModel, initialize_lora_eva_weights
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn
from torch.nn import functional as F

TOGETHER = 256
"""Tokens that are decomposed at a time."""


class Components:
    """The `count` leading principal components of the rows seen so far, by incremental PCA (Ross et al. 2008)."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.waiting: list[Tensor] = []
        self.seen = 0
        self.total = 0.0
        self.mean_I = torch.zeros(())
        self.scaled_KI = torch.zeros(0)

    def add(self, x_NI: Tensor) -> None:
        """See more rows; they are kept until there are enough to be worth a decomposition."""
        self.waiting.append(x_NI)
        if sum(map(len, self.waiting)) >= TOGETHER:
            self._decompose()

    def directions(self) -> tuple[Tensor, Tensor]:
        """Unit vectors (K, I), the leading component first, and the share of all variance along each (K,).

        Where the rows vary in fewer than K directions, the rest is random, with a share of zero.
        """
        if self.waiting:
            self._decompose()
        lengths_K = self.scaled_KI.norm(dim=1)
        known_count, inputs = self.scaled_KI.shape
        random_KI = torch.randn(self.count - known_count, inputs).to(self.scaled_KI.device)
        directions_KI = F.normalize(torch.cat((self.scaled_KI, random_KI)))
        return directions_KI, F.pad(lengths_K.square() / max(self.total, 1e-30), (0, self.count - known_count))

    def _decompose(self) -> None:
        x_NI = torch.cat(self.waiting).float()
        self.waiting = []
        mean_I, rows = x_NI.mean(0), len(x_NI)
        centred_NI = x_NI - mean_I
        parts = [centred_NI]
        if self.seen:
            moved_I = (self.seen * rows / (self.seen + rows)) ** 0.5 * (self.mean_I - mean_I)
            parts = [self.scaled_KI, centred_NI, moved_I[None]]
            self.total += float(moved_I.square().sum())
            mean_I = self.mean_I + (mean_I - self.mean_I) * rows / (self.seen + rows)
        self.total += float(centred_NI.square().sum())
        self.mean_I, self.seen = mean_I, self.seen + rows
        _, S_K, V_KI = torch.linalg.svd(torch.cat(parts), full_matrices=False)
        kept = min(self.count, int((S_K / S_K[0] > 1e-6).sum()))
        self.scaled_KI = S_K[:kept, None] * V_KI[:kept]


@torch.no_grad()
def excited_directions(model: PeftModel, sample: Iterable[Mapping[str, Tensor]], count: int) -> dict[str, Components]:
    """Components of the inputs of every LoRA layer, by the layer's path; layers that share inputs share them."""
    by_layer: dict[str, Components] = {}
    last: list[Any] = [None, None]

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def see(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            if arguments[0] is last[0]:
                by_layer.setdefault(name, last[1])
                return
            components = by_layer.setdefault(name, Components(count))
            components.add(arguments[0].flatten(0, -2))
            last[:] = arguments[0], components

        return see

    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]
    handles = [module.register_forward_pre_hook(watch(name)) for name, module in layers]  # type: ignore[attr-defined]
    training = model.training
    model.eval()
    try:
        for inputs in sample:
            model(**inputs)
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    return by_layer


def share_out(components: Mapping[str, Components], *, rank: int) -> dict[str, Tensor]:
    """Choose the components that explain most, `rank` times as many as there are layers, and group them by layer."""
    directions = {name: components.directions() for name, components in components.items()}
    shares = torch.cat([share_K for _, share_K in directions.values()])
    chosen = torch.zeros_like(shares, dtype=torch.bool)
    chosen[shares.argsort(descending=True, stable=True)[: rank * len(components)]] = True
    parts = chosen.split([len(share_K) for _, share_K in directions.values()])
    return {name: KI[: int(part.sum())] for (name, (KI, _)), part in zip(directions.items(), parts, strict=True)}


def start_there(model: PeftModel, sample: Iterable[Mapping[str, Tensor]], *, rank: int, rho: float) -> None:
    """Set every LoRA layer's rank and A from the leading components of its inputs, and B to zero.

    Args:
        sample: Model inputs; rows without padding, which would count as data.
        rho: Times `rank` that a layer may have; a layer that deserves none has no adapter.
    """
    moved = ({name: each.to(model.device) for name, each in inputs.items()} for inputs in sample)
    layer_components = excited_directions(model, moved, math.ceil(rho * rank))
    directions = share_out(layer_components, rank=rank)
    config: Any = model.peft_config["default"]
    config.init_lora_weights, config.eva_config = "eva", EvaConfig(rho=rho)
    initialize_lora_eva_weights(model, eva_state_dict=dict(directions))
    kept = (name.removeprefix("base_model.model.") for name, A_KI in directions.items() if len(A_KI))
    config.target_modules = set(kept)  # PEFT shortens the paths to endings that may also mean a layer without ranks
    config.init_lora_weights, config.eva_config = True, None  # what is shipped starts from nothing
    for name, A_KI in directions.items():
        if len(A_KI):
            layer: Any = model.get_submodule(name)
            layer.lora_A["default"].weight.data = A_KI.clone()  # PEFT rounds to the backbone's precision
            layer.lora_B["default"].weight.data = layer.lora_B["default"].weight.data.float()
