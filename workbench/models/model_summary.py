"""Summary of a model for the person who runs it and for the manifest."""

from __future__ import annotations

from typing import Any

from torch import nn

from workbench import adapters
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


def model(config: RunConfig, backbone: Backbone, attached: nn.Module, *, own: int | None = None) -> dict[str, Any]:
    """Facts about the model for the manifest and the report.

    Args:
        attached: With its adapters.
        own: Values that train in the one adapter of a bank that is meant.
    """
    total, trainable = adapters.count(attached)
    own = trainable if own is None else own
    return {
        "id": config.model.id,
        "weights": backbone.weights,
        "compute": str(backbone.compute).removeprefix("torch."),
        "attention": backbone.model.config._attn_implementation,
        "parameters": total - trainable + own,
        "trainable": own,
        "weight_bytes": backbone.weight_bytes,
        "notes": backbone.notes,
    }
