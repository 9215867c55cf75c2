"""The places of single weights that train, chosen by a score of every weight of a layer.

Legend: O outputs, I inputs, P places.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.supertuning.layer import SupertuningLayer
from safetensors import SafetensorError
from torch import Tensor, nn

from workbench.errors import BackboneError


def places(model: nn.Module) -> dict[str, Tensor]:
    """The places that train in each layer (P), int32 indices into its flat weight, by the layer's path."""
    return {path: layer.supertuning_indices["default"] for path, layer in _layers(model).items()}


@torch.no_grad()
def place(layer: SupertuningLayer, score_OI: Tensor) -> None:
    """Train the weights with the highest scores, as many as the layer has places."""
    place_P: Tensor = layer.supertuning_indices["default"]
    place_P.copy_(torch.topk(score_OI.flatten(), len(place_P)).indices.sort().values)


def of_largest_gradients(model: nn.Module, losses: Iterable[Tensor], *, squared: bool) -> None:
    """Choose the weights with the largest summed gradients, or squared gradients of single rows.

    The squares are the diagonal of the empirical Fisher information (Sung et al. 2021, equation 6), times the number of
    rows. The sums take four bytes for each weight of a changed layer.

    Args:
        losses: One loss for each row, with a graph that is computed when it is asked for.
    """
    layers = list(_layers(model).values())
    weights = {layer: layer.get_base_layer().weight for layer in layers}
    totals = {layer: torch.zeros_like(weight, dtype=torch.float32) for layer, weight in weights.items()}
    with _having_gradients({weights[layer]: totals[layer] for layer in layers}, squared=squared):
        for loss in losses:
            loss.backward(inputs=list(weights.values()))  # no trainable value gets a gradient
    for layer in layers:
        place(layer, totals[layer].abs_())


@contextmanager
def _having_gradients(totals: dict[nn.Parameter, Tensor], *, squared: bool) -> Iterator[None]:
    """Compute gradients of these frozen weights inside the block; each is added to its total and freed at once."""

    def add(weight: nn.Parameter) -> None:
        assert weight.grad is not None
        gradient_OI = weight.grad.float()
        totals[weight] += gradient_OI.square() if squared else gradient_OI
        weight.grad = None

    handles = [weight.requires_grad_(True).register_post_accumulate_grad_hook(add) for weight in totals]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for weight in totals:
            weight.requires_grad_(False)


def moved_furthest(model: PeftModel, folder: Path) -> None:
    """Choose the weights that a full fine-tuning moved furthest (Ansell et al. 2022, section 3.1).

    Args:
        folder: Of the fine-tuned model, which is loaded for the comparison.

    Raises:
        BackboneError: It is another model, or equal to the backbone.
    """
    backbone: Any = model.get_base_model()
    kind = type(backbone)
    try:
        trained_model = kind.from_pretrained(str(folder), dtype="auto")
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise BackboneError(
            f"adapter.trained={folder}: it cannot be read as a {kind.__name__} "
            f"({str(error).splitlines()[0]}). Name a full training of the same backbone."
        ) from None
    layers = dict(trained_model.named_modules())

    def ends(path: str) -> Tensor | None:
        layer = layers.get(path)
        return layer.weight.detach() if isinstance(layer, nn.Linear) else None

    moved = 0.0
    for path, layer in _layers(model).items():
        weight_OI = layer.get_base_layer().weight
        end_OI = ends(path.removeprefix("base_model.model."))
        if end_OI is None or end_OI.shape != weight_OI.shape:
            raise BackboneError(
                f"adapter.trained={folder}: its {path.removeprefix('base_model.model.')} is not that of "
                f"{backbone.config._name_or_path}. Name a full training of the same backbone."
            )
        way_OI = (end_OI.to(weight_OI.device).float() - weight_OI.float()).abs()
        moved += float(way_OI.sum())
        place(layer, way_OI)
    if not moved:
        raise BackboneError(
            f"adapter.trained={folder}: no weight moved from {backbone.config._name_or_path}. Name a model that "
            "has trained."
        )


def _layers(model: nn.Module) -> dict[str, Any]:
    return {path: module for path, module in model.named_modules() if isinstance(module, SupertuningLayer)}
