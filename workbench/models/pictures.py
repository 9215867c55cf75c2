"""Backbones that read pictures: their channels and sizes, precision of the inputs, statistics that stay as they are.

Legend: B rows, H and W height and width, in pixels.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import PretrainedConfig, PreTrainedModel

from workbench.adapters import anatomy
from workbench.errors import BackboneError, ConfigError

CHANNELS = 3
"""Channels of every picture: red, green and blue; those of a grey one are equal."""
_INTERPOLATE = "interpolate_pos_encoding"


@dataclass(frozen=True)
class PictureSizes:
    """Sides of the square pictures that a backbone reads, in pixels."""

    own: int | None
    """The side that it was trained with; None where its configuration does not say it."""
    step: int | None
    """It reads every multiple of this; None: no side but its own."""

    def refusal(self, size: int) -> str | None:
        """Say what to write in place of a side that it cannot read; None where it can."""
        if size == self.own or (self.step and size % self.step == 0):
            return None
        if self.step is None:
            return f"it reads pictures of one size. Write image.size={self.own}."
        nearest = max(self.step, round(size / self.step) * self.step)
        return (
            f"it cuts pictures into squares of {self.step} pixels, and would lose the rest. Write image.size={nearest}."
        )


def picture_sizes(model: PreTrainedModel) -> PictureSizes:
    """The sizes of pictures that a backbone reads, found by calling it; it may be without weights."""
    own, stem = own_size(model.config), _stem(model)
    cuts = stem.kernel_size == stem.stride and not stem.padding_mode == "circular" and stem.padding in ((0, 0), "valid")
    step = int(stem.stride[0]) if cuts else 1
    return PictureSizes(own, step if own is None or _reads(model, own + max(step, 32 // step * step)) else None)


def require_size(model: PreTrainedModel, size: int | None) -> None:
    """Raise ConfigError where a backbone does not read pictures of this side; None stands for its own."""
    if size is None:
        return
    reason = picture_sizes(model).refusal(size)
    if reason is None and not _reads(model, size):
        reason = "pictures of this side leave nothing behind its last layers. Write a larger image.size."
    if reason is not None:
        raise ConfigError(f"image.size={size} does not fit {type(model).__name__}: {reason}")


def own_size(hub: PretrainedConfig) -> int | None:
    """The side in pixels that a backbone was trained with, by its configuration; None where it does not say it."""
    vision: Any = getattr(hub, "vision_config", hub)
    size = getattr(vision, "image_size", None)
    return size if size is None or isinstance(size, int) else int(max(size))


def prepare(model: PreTrainedModel, compute: torch.dtype) -> None:
    """Make a loaded backbone give a row the same outputs whatever is beside it, in any precision and size.

    Statistics of batch normalisation stay those of pretraining, also in training: a row's outputs would depend on the
    rows of its micro-batch. Position embeddings are interpolated where pictures are not of its own size.

    Raises:
        BackboneError: it reads pictures of other than three channels.
    """
    channels = _stem(model).in_channels
    if channels != CHANNELS:
        raise BackboneError(
            f"{type(model).__name__} reads pictures of {channels} channel{'s' * (channels != 1)}, and pictures have "
            f"{CHANNELS} here: red, green and blue, which are equal in a grey one. Take a backbone with num_channels=3."
        )
    hold_statistics(model)
    tower = _tower(model)
    interpolates = _INTERPOLATE in inspect.signature(tower.forward).parameters
    tower.register_forward_pre_hook(_Fit(compute, own_size(model.config) if interpolates else None), with_kwargs=True)


class _Fit:
    """A hook in front of a tower: pictures in the precision that it computes in, embeddings for their size."""

    def __init__(self, compute: torch.dtype, own: int | None) -> None:
        self.compute = compute
        self.own = own
        """The side beside which position embeddings have to be interpolated; None where they never have to be."""

    def __call__(
        self, tower: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        first: Tensor = arguments[0] if arguments else named["pixel_values"]
        pixels_B3HW = first.to(self.compute)
        if self.own is not None and tuple(first.shape[-2:]) != (self.own, self.own):
            named = {**named, _INTERPOLATE: True}
        if arguments:
            return (pixels_B3HW, *arguments[1:]), named
        return (), {**named, "pixel_values": pixels_B3HW}


def hold_statistics(model: nn.Module) -> None:
    """Let batch normalisation use the statistics that it has, in training too; its factors and biases may train."""
    for module in model.modules():
        if isinstance(module, _BatchNorm) and not isinstance(module, _Held):
            module.__class__ = _held(type(module))
            module.eval()


class _Held:
    """What makes batch normalisation stay in evaluation mode, whatever mode the model around it is put in."""

    training: bool

    def train(self, mode: bool = True) -> Any:
        """Stay as it is."""
        self.training = False
        return self


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def _held(cls: type[nn.Module]) -> type[nn.Module]:
    """One subclass of the same name for all modules of a class: the compiler guards on it."""
    if cls not in _CLASSES:
        _CLASSES[cls] = type(cls.__name__, (_Held, cls), {})
    return _CLASSES[cls]


def _tower(model: PreTrainedModel) -> nn.Module:
    """What is below the head."""
    return model.get_submodule(anatomy.body(model))


def _stem(model: PreTrainedModel) -> nn.Conv2d:
    """The first convolution of a backbone, which reads the pixels."""
    found = next((module for module in _tower(model).modules() if isinstance(module, nn.Conv2d)), None)
    if found is None:
        raise BackboneError(f"{type(model).__name__} reads pictures by no convolution, which is not known here yet. "
                            "Take another backbone, such as facebook/dinov2-small.")  # fmt: skip
    return found


@torch.no_grad()
def _reads(model: PreTrainedModel, size: int) -> bool:
    """Whether a backbone computes pictures of this side."""
    tower = _tower(model)
    named = {_INTERPOLATE: True} if _INTERPOLATE in inspect.signature(tower.forward).parameters else {}
    weight = _stem(model).weight
    pixels_B3HW = torch.zeros(1, weight.shape[1], size, size, device=weight.device, dtype=weight.dtype)
    training = model.training
    model.eval()
    try:
        tower(pixel_values=pixels_B3HW, **named)
    except (ValueError, RuntimeError):
        return False
    finally:
        model.train(training)
    return True
