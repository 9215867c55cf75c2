"""Summary of a model for the person who runs it and for the manifest."""

from __future__ import annotations

from typing import Any

from torch import nn

from workbench import adapters
from workbench.adapters.banks.bank import Bank
from workbench.adapters.method import Method
from workbench.adapters.target_modules import about_experts
from workbench.config import RunConfig
from workbench.models.backbones import QUANTISED, Backbone
from workbench.runs import units


def storage(backbone: Backbone, method: Method) -> str:
    """How the weights are stored, what they take and what they would take unquantised, and what is unusual there."""
    size, plain = backbone.weight_bytes, 2 * adapters.count(backbone.model).total
    in_bfloat16 = f" ({units.size(plain)} in bfloat16)" if backbone.weights in QUANTISED else ""
    lines = [f"Weights: {backbone.weights}, {units.size(size)}{in_bfloat16}", *backbone.notes]
    return "\n  ".join([*lines, *filter(None, [about_experts(backbone.model, method)])])


def model(config: RunConfig, backbone: Backbone, attached: nn.Module) -> dict[str, Any]:
    """Facts about the model with its adapter for the manifest and the report."""
    return _facts(config, backbone, *adapters.count(attached))


def member(config: RunConfig, backbone: Backbone, bank: Bank, name: str) -> dict[str, Any]:
    """The same with one member of a bank alone."""
    total, trainable = adapters.count(bank.model)
    own = sum(each.numel() for each in bank.parameters_of(name).values())
    return _facts(config, backbone, total - trainable + own, own)


def _facts(config: RunConfig, backbone: Backbone, total: int, trainable: int) -> dict[str, Any]:
    return {
        "id": config.model.id,
        "weights": backbone.weights,
        "compute": str(backbone.compute).removeprefix("torch."),
        "attention": backbone.model.config._attn_implementation,
        "parameters": total,
        "trainable": trainable,
        "weight_bytes": backbone.weight_bytes,
        "notes": backbone.notes,
    }
