"""RandAugment (Cubuk et al. 2020) and TrivialAugment (Müller & Hutter 2021): operations drawn from a list of 14.

Legend: h, w of the picture, 3 channels. Magnitudes are shares of an operation's largest one, in 0 to 1; ranges and
meanings are those of the papers' code, with linear interpolation, and with `image.augment.border` beyond the edges.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias, get_args

import cv2
import numpy as np
from numpy.typing import NDArray

from workbench.config.sections.picture_augment_config import AugmentConfig
from workbench.data.images import colour, warping
from workbench.data.images.warping import Border

Picture: TypeAlias = NDArray[np.uint8]
Operation = Literal[
    "identity",
    "autocontrast",
    "equalize",
    "rotate",
    "solarize",
    "color",
    "posterize",
    "contrast",
    "brightness",
    "sharpness",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)

MAGNITUDES = 30
"""Largest magnitude; there are 31, from 0."""
_SMOOTH = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], dtype=np.float32) / 13
_FACTORS: tuple[Operation, ...] = ("color", "contrast", "brightness", "sharpness")
_SIGNED: tuple[Operation, ...] = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y", *_FACTORS)


Drawn: TypeAlias = tuple[Operation, float]
"""An operation, and its value as `apply` takes it."""


def randaugment(
    config: AugmentConfig, rng: np.random.Generator, *, size: tuple[int, ...], strength: float = 1.0
) -> list[Drawn]:
    """Draw `config.randaugment` operations with replacement, all of one magnitude.

    Args:
        size: Height and width of the picture.
        strength: Share of the magnitude.
    """
    # The paper's shifts are 150 pixels of its pictures of 331 at most.
    shift_y, shift_x = (150 / 331 * side for side in size)
    largest = _largest(rotate=30.0, factor=0.9, shear=0.3, shift_x=shift_x, shift_y=shift_y, bits=4)
    magnitude = config.randaugment_magnitude / MAGNITUDES * strength
    return [_drawn(largest, magnitude, rng) for _ in range(config.randaugment)]


def trivialaugment(rng: np.random.Generator, *, share: float = 1.0, strength: float = 1.0) -> Drawn:
    """Draw one operation of one of 31 magnitudes.

    Args:
        share: The picture's side as a share of the one at full resolution, at which shifts are 32 pixels at most.
        strength: Share of the magnitude.
    """
    shift = 32.0 * share
    largest = _largest(rotate=135.0, factor=0.99, shear=0.99, shift_x=shift, shift_y=shift, bits=6)
    return _drawn(largest, int(rng.integers(MAGNITUDES + 1)) / MAGNITUDES * strength, rng)


def _largest(
    *, rotate: float, factor: float, shear: float, shift_x: float, shift_y: float, bits: int
) -> dict[Operation, float]:
    """The largest value of each operation that has one."""
    return {
        **dict.fromkeys(_FACTORS, factor),
        "rotate": rotate,
        "shear_x": shear,
        "shear_y": shear,
        "translate_x": shift_x,
        "translate_y": shift_y,
        "posterize": bits,
        "solarize": 256.0,
    }


def _drawn(largest: Mapping[Operation, float], magnitude: float, rng: np.random.Generator) -> Drawn:
    """A random operation at a share of its largest value, with a random sign where it has two directions."""
    number, sign = rng.random(2).tolist()
    operation = OPERATIONS[int(number * len(OPERATIONS))]
    value = magnitude * largest.get(operation, 0.0)
    return operation, -value if operation in _SIGNED and sign < 0.5 else value


def apply(operation: Operation, picture_hw3: Picture, value: float, *, border: Border = "black") -> Picture:
    """The picture after an operation.

    Args:
        value: Degrees counter-clockwise, change of a factor (0 changes nothing), slope of a shear from the upper left
            corner, pixels of a shift to the right or down, bits taken away, or 256 less the level from which
            `solarize` inverts. No meaning for the others.
    """
    if operation == "posterize":
        kept = 0xFF << round(value) & 0xFF
        return colour.looked_up(picture_hw3, np.arange(256) & kept)
    if operation == "solarize":
        levels = np.arange(256)
        return colour.looked_up(picture_hw3, np.where(levels >= 256 - value, 255 - levels, levels))
    if operation == "autocontrast":
        return colour.looked_up(picture_hw3, _autocontrast(_histograms(picture_hw3)))
    if operation == "equalize":
        return colour.looked_up(picture_hw3, _equalize(_histograms(picture_hw3)))
    if operation == "brightness":
        return colour.toned(picture_hw3, brightness=1 + value)
    if operation == "contrast":
        return colour.toned(picture_hw3, contrast=1 + value)
    if operation == "color":
        return colour.tinted(picture_hw3, saturation=1 + value)
    if operation == "sharpness":
        return _sharpened(picture_hw3, 1 + value)
    if operation == "identity":
        return picture_hw3
    return warping.affine(picture_hw3, _inverse(operation, picture_hw3, value), border=border)


def _inverse(operation: Operation, picture_hw3: Picture, value: float) -> NDArray[np.float64]:
    """Matrix (2, 3) from a pixel of the result to its place in the picture."""
    if operation == "rotate":
        height, width = picture_hw3.shape[:2]
        box = warping.Box(0.0, 0.0, height, width)
        return warping.Warp(box, degrees=value).inverse((height, width))
    shear_x, shear_y, shift_x, shift_y = (
        value if operation == name else 0.0 for name in ("shear_x", "shear_y", "translate_x", "translate_y")
    )
    return np.array([[1.0, shear_x, -shift_x], [shear_y, 1.0, -shift_y]])


def _histograms(picture_hw3: Picture) -> NDArray[np.int64]:
    """Pixels (256, 3) of each level in each channel."""
    counts = [cv2.calcHist([picture_hw3], [channel], None, [256], [0, 256])[:, 0] for channel in range(3)]
    return np.stack(counts, axis=1).astype(np.int64)


def _autocontrast(pixels: NDArray[np.int64]) -> NDArray[np.float64]:
    """Table (256, 3) that stretches each channel's levels to 0 to 255."""
    levels = np.arange(256, dtype=np.float64)[:, None]
    lowest = (pixels > 0).argmax(0)
    highest = 255 - (pixels[::-1] > 0).argmax(0)
    spread = highest - lowest
    stretched = np.floor((levels - lowest) * (255 / np.maximum(spread, 1)))
    return np.where(spread > 0, stretched, levels)


def _equalize(pixels: NDArray[np.int64]) -> NDArray[np.float64]:
    """Table (256, 3) that spreads each channel's levels evenly, by Pillow's rule for rounding."""
    levels = np.arange(256, dtype=np.float64)[:, None]
    highest = 255 - (pixels[::-1] > 0).argmax(0)
    step = (pixels.sum(0) - pixels[highest, range(3)]) // 255
    below = pixels.cumsum(0) - pixels
    spread = (below + step // 2) // np.maximum(step, 1)
    return np.where(step > 0, spread, levels)


def _sharpened(picture_hw3: Picture, factor: float) -> Picture:
    """Multiply the distance from a smoothed picture; pixels at the edge stay."""
    smooth_hw3 = cv2.filter2D(picture_hw3, -1, _SMOOTH)
    blend_hw3 = np.asarray(cv2.addWeighted(picture_hw3, factor, smooth_hw3, 1 - factor, 0), dtype=np.uint8)
    result_hw3: Picture = picture_hw3.copy()
    result_hw3[1:-1, 1:-1] = blend_hw3[1:-1, 1:-1]
    return result_hw3
