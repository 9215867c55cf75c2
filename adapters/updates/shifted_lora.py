"""LoRA that starts at B0 A0 instead of zero and is the identity all the same: W + scale * (B A - B0 A0).

Legend: R rank, I inputs, O outputs.

The papers take B0 A0 out of the frozen weights. Here it stays apart, which computes the same, leaves the weights as
they are (so they may be quantised, and are there again when the adapter is off), and makes what is shipped plain LoRA.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from peft import LoraModel, PeftConfig, PeftModel
from peft.tuners.lora.layer import LoraLayer, LoraVariant
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.adapters.anatomy import dense_weight
from workbench.adapters.export_form import OwnForm

Start = Callable[[Tensor, int, float], tuple[Tensor, Tensor]]
"""A function from a weight (O, I), a rank and a scale to A0 (R, I) and B0 (O, R)."""


class Shift(LoraVariant):
    """A shifted layer's computation; the layer holds B0 and A0 as buffers that no state dict has."""

    @staticmethod
    def merge_safe(module: Any, active_adapter: str, orig_weight: Tensor) -> Tensor:
        return orig_weight + _update(module, active_adapter).to(orig_weight)

    @staticmethod
    def merge_unsafe(module: Any, active_adapter: str, orig_weight: Tensor) -> None:
        orig_weight.data += _update(module, active_adapter).to(orig_weight)

    @staticmethod
    def unmerge(module: Any, active_adapter: str, orig_weight: Tensor) -> Tensor:
        return orig_weight - _update(module, active_adapter).to(orig_weight)

    @staticmethod
    def forward(module: Any, active_adapter: str, x: Tensor, result: Tensor, **_: Any) -> Tensor:
        """Compute the update with dropout and its start without: in the papers the start is a part of the weights."""
        update = module.lora_B[active_adapter](module.lora_A[active_adapter](module.lora_dropout[active_adapter](x)))
        start = F.linear(F.linear(x, module.start_A_RI.to(x.dtype)), module.start_B_OR.to(x.dtype))
        shifted: Tensor = result + ((update - start) * module.scaling[active_adapter]).to(result.dtype)
        return shifted


def shifted_factors(layer: Any, name: str) -> tuple[Tensor, Tensor]:
    """(A, A0) and (B, -B0), whose product is the whole update, as LoRA of twice the rank."""
    down, up = layer.lora_A[name].weight, layer.lora_B[name].weight
    return torch.cat((down, layer.start_A_RI.to(down))), torch.cat((up, -layer.start_B_OR.to(up)), dim=1)


class ShiftedLora(OwnForm, LoraModel):
    """PEFT's LoRA, shipped with its start taken off: plain LoRA of twice the rank over the original weights."""

    def shipped(self, name: str, tensors: dict[str, Tensor]) -> tuple[PeftConfig, dict[str, Tensor]]:
        """Plain LoRA of twice the rank, as PEFT converts PiSSA; the scale stays."""
        live: Any = self.peft_config[name]
        config = copy.copy(live)
        for path, layer in _layers(self):
            if name in layer.lora_variant:
                down, up = (f"base_model.{path}.lora_{part}.{name}.weight" for part in "AB")
                tensors[down] = torch.cat((tensors[down], layer.start_A_RI.to(tensors[down])))
                tensors[up] = torch.cat((tensors[up], -layer.start_B_OR.to(tensors[up])), dim=1)
                stabilised = math.sqrt(layer.r[name]) if live.use_rslora else 1.0
                config.r, config.lora_alpha = 2 * layer.r[name], 2 * layer.lora_alpha[name] * stabilised
                config.use_rslora = False  # which would divide by the root of twice the rank
        return config, tensors


@torch.no_grad()
def shift(model: PeftModel, start: Start) -> None:
    """Let every LoRA layer start where `start` says, given its weight in float32, dequantised."""
    for _, layer in _layers(model):
        weight_OI = dense_weight(layer.get_base_layer()).float()
        A_RI, B_OR = start(weight_OI, layer.r["default"], layer.scaling["default"])
        layer.lora_A["default"].weight.copy_(A_RI)
        layer.lora_B["default"].weight.copy_(B_OR)
    shift_later(model)


@torch.no_grad()
def shift_later(model: PeftModel) -> None:
    """Let every LoRA layer start where it is, until `start_at` says otherwise."""
    for _, layer in _layers(model):
        layer.register_buffer("start_A_RI", layer.lora_A["default"].weight.clone(), persistent=False)
        layer.register_buffer("start_B_OR", layer.lora_B["default"].weight.clone(), persistent=False)
        layer.lora_variant["default"] = Shift()
    model.base_model.__class__ = ShiftedLora


@torch.no_grad()
def start_at(layer: Any, A_RI: Tensor, B_OR: Tensor) -> None:
    """Let a shifted layer start anew, with these factors; the start keeps its precision where those compute in less."""
    for own, start, value in (
        (layer.lora_A["default"].weight, layer.start_A_RI, A_RI),
        (layer.lora_B["default"].weight, layer.start_B_OR, B_OR),
    ):
        start.copy_(value)
        own.copy_(value)


def starts(model: nn.Module) -> dict[str, Tensor]:
    """A0 (R, I) and B0 (O, R) of every shifted layer, by the names of the parameters that begin there."""
    return {
        f"{path}.lora_{part}.default.weight": start
        for path, layer in _layers(model)
        for part, start in (("A", layer.start_A_RI), ("B", layer.start_B_OR))
    }


def _layers(model: nn.Module) -> list[tuple[str, Any]]:
    return [(path, module) for path, module in model.named_modules() if isinstance(module, LoraLayer)]


def _update(layer: Any, name: str) -> Tensor:
    """scale * (B A - B0 A0), as the base layer stores its weight."""
    down, up = shifted_factors(layer, name)
    update: Tensor = (up.float() @ down.float()) * layer.scaling[name]
    return update.T if layer.fan_in_fan_out else update
