"""The tower of a backbone that reads pictures: all that is below its head."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from workbench.adapters import anatomy
from workbench.errors import BackboneError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PretrainedConfig, PreTrainedModel

INTERPOLATE = "interpolate_pos_encoding"
"""The argument by which a tower fits its position embeddings to the size of its pictures."""
USUAL = 224
"""Side in pixels of most backbones, for those whose configuration says none."""


def tower(model: PreTrainedModel) -> nn.Module:
    """The module below the head."""
    return model.get_submodule(anatomy.body(model))


def stem(model: PreTrainedModel) -> nn.Conv2d:
    """The first convolution, which reads the pixels; raises BackboneError where there is none."""
    from torch import nn

    conv = next((module for module in tower(model).modules() if isinstance(module, nn.Conv2d)), None)
    if conv is None:
        raise BackboneError(
            f"{type(model).__name__} reads pictures by no convolution, which is not known here yet. "
            "Take another backbone, such as facebook/dinov2-small."
        )
    return conv


def own_size(hub: PretrainedConfig) -> int | None:
    """The side in pixels that a backbone was trained with, by its configuration; None where it does not say it."""
    vision: Any = getattr(hub, "vision_config", hub)
    of_timm = getattr(hub, "pretrained_cfg", None) or {}
    size = getattr(vision, "image_size", None) or of_timm.get("input_size")
    return size if size is None or isinstance(size, int) else int(max(size))


def blank(model: PreTrainedModel, size: int | None = None) -> Tensor:
    """One picture (1, 3, size, size) of zeros, by default of the backbone's own size, where its weights are."""
    import torch

    weight, side = stem(model).weight, size or own_size(model.config) or USUAL
    return torch.zeros(1, weight.shape[1], side, side, device=weight.device, dtype=weight.dtype)


def reads(model: PreTrainedModel, size: int | None = None) -> bool:
    """Whether the tower computes pictures of this side, by default of its own; it may be without weights."""
    try:
        call(model, blank(model, size))
    except (ValueError, RuntimeError, AssertionError):
        return False
    return True


def call(model: PreTrainedModel, picture_13HW: Tensor) -> None:
    """Let the tower compute a picture, in evaluation and without gradients; it may be without weights."""
    import torch

    own, side = own_size(model.config), picture_13HW.shape[-1]
    named = {INTERPOLATE: True} if own not in (None, side) and interpolates(model) else {}
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            tower(model)(picture_13HW, **named)
    finally:
        model.train(training)


def interpolates(model: PreTrainedModel) -> bool:
    """Whether the tower has to be told to fit its position embeddings to pictures of another size."""
    return INTERPOLATE in inspect.signature(tower(model).forward).parameters
