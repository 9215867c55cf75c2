"""Settings of pictures in words, for a person who checks a recipe. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from workbench.config.sections.picture_augment_config import AugmentConfig, Growth
from workbench.config.sections.picture_prepare_config import PrepareConfig
from workbench.data.images.picture_format import PictureFormat
from workbench.runs.units import percent


def preparation(config: PrepareConfig, format: PictureFormat) -> str:
    """The steps that every picture goes through once, in their order."""
    return "; ".join([*_steps_before(config), *_resizing(config, format)])


def _steps_before(config: PrepareConfig) -> Iterator[str]:
    """Steps at the size of the file."""
    if config.median is not None:
        yield f"median of {config.median} x {config.median} pixels"
    if config.standardise != "none":
        whose = "its own values" if config.standardise == "picture" else "the training pictures"
        yield f"brightness and contrast standardised by {whose}"
    if config.edges != "none":
        name = "edges by Canny" if config.edges == "canny" else "strength of gradients by Sobel"
        yield f"{name} {'in its place' if config.edges_as == 'replace' else 'drawn over it'}"
    if config.crop_to_object is not None:
        yield f"cropped to the largest object with a margin of {percent(config.crop_to_object)}"


def _resizing(config: PrepareConfig, format: PictureFormat) -> Iterator[str]:
    fit: Literal["stretch", "crop", "pad"] = format.fit if config.fit == "backbone" else config.fit
    size = _size(format.height, format.width)
    if fit == "stretch":
        yield f"stretched to {size}"
    elif fit == "pad":
        yield f"fitted into {size}, the rest in the mean colour"
    elif format.resized == (format.height, format.width):
        yield f"shorter side resized, middle cut out: {size}"
    else:
        yield f"resized to cover {_size(*format.resized)}, middle cut out: {size}"
    if config.colour == "grey":
        yield "grey"


def _size(height: int, width: int) -> str:
    return f"{width} x {height}"


def augmentation(config: AugmentConfig) -> str:
    """The changes of training pictures, in their order; empty where there are none."""
    return "; ".join([*_moves(config), *_operations(config), *_tones(config), *_losses(config), *_growth(config)])


def _moves(config: AugmentConfig) -> Iterator[str]:
    if config.crop_scale is not None:
        least, largest = config.crop_scale
        low, high = (f"{each:.3g}" for each in config.crop_ratio)
        yield f"crops of {percent(least)} to {percent(largest)} of the area, {low} to {high} times as wide as high"
    for name, sides in (("horizontal_flip", "left and right"), ("vertical_flip", "top and bottom")):
        if share := getattr(config, name):
            yield f"{sides} exchanged in {percent(share)}"
    if config.rotation:
        yield f"turns of up to {config.rotation:g} degrees to either side"
    if config.translate:
        yield f"shifts of up to {percent(config.translate)} of the side"
    if config.shear:
        yield f"shear of up to {config.shear:g} degrees"


def _operations(config: AugmentConfig) -> Iterator[str]:
    if config.randaugment:
        yield f"RandAugment: {config.randaugment} operations of magnitude {config.randaugment_magnitude:g}"
    if config.trivialaugment:
        yield "TrivialAugment: one operation of any magnitude"
    uses_border = config.rotation or config.translate or config.shear or config.randaugment or config.trivialaugment
    if uses_border:
        filled = {"reflect": "mirrored", "edge": "filled with the nearest pixel", "black": "black"}[config.border]
        yield f"beyond the edge {filled}"


def _tones(config: AugmentConfig) -> Iterator[str]:
    for name in ("brightness", "contrast", "saturation"):
        if share := getattr(config, name):
            yield f"{name} ± {percent(share)}"
    if config.gamma:
        yield f"gamma from {1 / (1 + config.gamma):.2g} to {1 + config.gamma:.2g}"
    if config.hue:
        yield f"hue turned by up to {360 * config.hue:.3g} degrees"
    if config.blur:
        yield f"blur of up to {config.blur:g} pixels"


def _losses(config: AugmentConfig) -> Iterator[str]:
    if config.erasing:
        fill = {"random": "noise", "mean": "the mean colour", "black": "black"}[config.erasing_fill]
        least, largest = config.erasing_area
        yield (
            f"a rectangle of {percent(least)} to {percent(largest)} of the area erased by {fill} in "
            f"{percent(config.erasing)}"
        )
    names = [name for name, is_on in (("mixup", config.mixup), ("CutMix", config.cutmix)) if is_on]
    if names:
        often = "always" if config.mix_probability == 1 else f"in {percent(config.mix_probability)}"
        yield f"mixed with another picture by {' or '.join(names)} {often}"


def _growth(config: AugmentConfig) -> Iterator[str]:
    grown: dict[str, Growth] = {"strength": config.curriculum.strength, "side": config.curriculum.resolution}
    for name, growth in grown.items():
        if growth.start < 1:
            yield f"{name} grows from {percent(growth.start)} to 100 % in the first {percent(growth.until)} of the run"
