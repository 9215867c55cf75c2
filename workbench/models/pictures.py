"""Backbones that read pictures: channels, sizes, precision of the inputs, frozen batch statistics.

Legend: B rows, H and W height and width, in pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import PreTrainedModel

from workbench.adapters import anatomy
from workbench.adapters.anatomy import INTERPOLATE, interpolates, picture_size, picture_stem, picture_tower, reads_size
from workbench.errors import BackboneError, ConfigError

CHANNELS = 3  # channels of every picture: red, green and blue; those of a grey one are equal


@dataclass(frozen=True)
class PictureSizes:
    """Sides of the square pictures that a backbone reads, in pixels."""

    own: int | None  # the side that it was trained with; None where its configuration does not say
    step: int | None  # it reads every multiple of this; None: only its own side

    def refusal(self, size: int) -> str | None:
        """What to write instead of a side that it cannot read; None where it can."""
        if size == self.own or (self.step and size % self.step == 0):
            return None
        if self.step is None:
            return f"it reads pictures of one size. Write image.size={self.own}."
        nearest = max(self.step, round(size / self.step) * self.step)
        return (
            f"it cuts pictures into squares of {self.step} pixels, and would lose the rest. Write image.size={nearest}."
        )


def picture_sizes(model: PreTrainedModel) -> PictureSizes:
    """The sizes of pictures that a backbone reads, found by calling it, with or without weights."""
    own, first = picture_size(model.config), picture_stem(model)
    cuts = first.kernel_size == first.stride and first.padding in ((0, 0), "valid")
    step = int(first.stride[0]) if cuts else 1
    return PictureSizes(own, step if own is None or reads_size(model, own + max(step, 32 // step * step)) else None)


def require_size(model: PreTrainedModel, size: int | None, *, smaller: bool = False) -> None:
    """Raise ConfigError where a backbone does not read pictures of this side; None stands for its own. `smaller`:
    whether it will read smaller pictures too."""
    sizes = picture_sizes(model)
    if smaller and sizes.step is None:
        raise ConfigError(
            f"image.augment.curriculum.resolution begins with smaller pictures, and {type(model).__name__} reads "
            "pictures of one size. Leave it out."
        )
    if size is None:
        return
    reason = sizes.refusal(size)
    if reason is None and not reads_size(model, size):
        reason = "pictures of this side leave nothing behind its last layers. Write a larger image.size."
    if reason is not None:
        raise ConfigError(f"image.size={size} does not fit {type(model).__name__}: {reason}")


def prepare(model: PreTrainedModel, compute: torch.dtype) -> None:
    """Make a loaded backbone give a row the same outputs whatever is beside it, in any precision and size.

    Statistics of batch normalisation stay those of pretraining, also in training: a row's outputs would depend on the
    rows of its micro-batch. Position embeddings are interpolated where pictures are not of its own size. Depthwise
    convolutions get their pixels with the channels last, which takes a fifth to a third of the time off a step. Raises
    BackboneError: it reads pictures of other than three channels.
    """
    channels = picture_stem(model).in_channels
    if channels != CHANNELS:
        raise BackboneError(
            f"{type(model).__name__} reads pictures of {channels} channel{'s' * (channels != 1)}, and pictures have "
            f"{CHANNELS} here: red, green and blue, which are equal in a grey one. Take a backbone with num_channels=3."
        )
    hold_batch_statistics(model)
    # Let no activation write over the product in front of it (Swin V2), which fused layers of adapters share.
    for module in model.modules():
        parts = list(module.children()) if isinstance(module, nn.Sequential) else []
        for product, activation in pairwise(parts):
            if anatomy.is_linear(product) and getattr(activation, "inplace", False):
                vars(activation)["inplace"] = False
    picture_tower(model).register_forward_pre_hook(
        _Fit(compute, picture_size(model.config) if interpolates(model) else None, _layout(model)), with_kwargs=True
    )


def hold_batch_statistics(model: nn.Module) -> None:
    """Let batch normalisation use the statistics that it has, in training too; its factors and biases may train."""
    for module in model.modules():
        if isinstance(module, _BatchNorm) and not isinstance(module, _Held):
            # One subclass of the same name for all modules of a class: the compiler guards on it.
            cls = type(module)
            if cls not in _CLASSES:
                _CLASSES[cls] = type(cls.__name__, (_Held, cls), {})
            module.__class__ = _CLASSES[cls]
            module.eval()


def _layout(model: nn.Module) -> torch.memory_format:
    """Order of the pixels in memory that the convolutions are fastest with; the layers behind the first keep it."""
    grouped = any(isinstance(module, nn.Conv2d) and module.groups > 1 for module in model.modules())
    return torch.channels_last if grouped else torch.contiguous_format


class _Fit:
    """A hook in front of a tower: pictures in the precision that it computes in, embeddings for their size."""

    def __init__(self, compute: torch.dtype, own: int | None, layout: torch.memory_format) -> None:
        self.compute = compute
        self.own = own
        """The side beside which position embeddings have to be interpolated; None where they never have to be."""
        self.layout = layout

    def __call__(
        self, _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        first: Tensor = arguments[0] if arguments else named["pixel_values"]
        pixels_B3HW = first.to(self.compute, memory_format=self.layout)
        if self.own is not None and tuple(first.shape[-2:]) != (self.own, self.own):
            named = {**named, INTERPOLATE: True}
        if arguments:
            return (pixels_B3HW, *arguments[1:]), named
        return (), {**named, "pixel_values": pixels_B3HW}


class _Held:
    """Batch normalisation that stays in evaluation mode, whatever mode the model around it is put in."""

    training: bool

    def train(self, mode: bool = True) -> Any:
        """Stay as it is."""
        self.training = False
        return self


_CLASSES: dict[type[_BatchNorm], type[_BatchNorm]] = {}
