"""Random changes of training pictures: a pure function of seed, epoch, row, repeat and progress.

Legend: H and W of the stored picture, h and w of the augmented one, 3 channels RGB. Micro-batches, worker processes,
ranks and resumed runs draw the same, because nothing is kept between two calls.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

import cv2
import numpy as np
from numpy.typing import NDArray

from workbench.config.sections.picture_augment_config import AugmentConfig
from workbench.data.images import colour, policies, warping
from workbench.data.images.draws import generator

Picture: TypeAlias = NDArray[np.uint8]

TRIALS = 10
"""Rectangles of a random area and ratio that are tried until one fits into the picture, as in the papers' code."""


class _Draws(NamedTuple):
    """Numbers in [0, 1), each for one change, so that switching a change on leaves the others as they were drawn."""

    horizontal_flip: float
    vertical_flip: float
    rotation: float
    translate_x: float
    translate_y: float
    shear: float
    brightness: float
    contrast: float
    gamma: float
    saturation: float
    hue: float
    blur: float
    erasing: float
    crop_x: float
    crop_y: float
    erasing_x: float
    erasing_y: float


def augment(
    picture_HW3: Picture,
    config: AugmentConfig,
    *,
    seed: int,
    epoch: int,
    row: int,
    repeat: int = 0,
    progress: float = 1.0,
    multiple: int = 1,
) -> Picture:
    """A row's picture as it is trained on in an epoch; the stored one itself, not a copy, where nothing is on.

    Args:
        picture_HW3: The stored picture.
        epoch: Number of the pass over the rows.
        row: Number of the row in its data set.
        repeat: How often the row was drawn before in this epoch, where sampling draws rows more than once.
        progress: Share of the run that is done, at the optimizer step that trains on the picture.
        multiple: The sides of the result are multiples of it, where the resolution is reduced.

    Returns:
        uint8 (h, w, 3), of the size that `output_size` says.
    """
    strength = config.curriculum.strength.at(progress)
    rng = generator("augment", seed=seed, epoch=epoch, row=row, repeat=repeat)
    numbers = rng.random(len(_Draws._fields) + 4 * TRIALS).tolist()
    drawn = _Draws._make(numbers[: len(_Draws._fields)])
    trials = numbers[len(_Draws._fields) :]
    result_HW3 = warping.warped(
        picture_HW3, _warp(picture_HW3, config, drawn, trials[: 2 * TRIALS], strength), border=config.border
    )
    size = output_size(picture_HW3.shape[:2], config, progress=progress, multiple=multiple)
    result_hw3 = warping.resized(result_HW3, size)
    for operation, value in _operations(config, rng, size, size[1] / picture_HW3.shape[1], strength):
        result_hw3 = policies.apply(operation, result_hw3, value, border=config.border)
    result_hw3 = _recoloured(result_hw3, config, drawn, strength)
    if config.blur:
        sigma = drawn.blur * config.blur * strength * result_hw3.shape[1] / picture_HW3.shape[1]
        result_hw3 = colour.blurred(result_hw3, sigma)
    if drawn.erasing < config.erasing * strength:
        result_hw3 = _erased(result_hw3, config, drawn, trials[2 * TRIALS :], rng)
    return result_hw3


def output_size(
    size: tuple[int, ...], config: AugmentConfig, *, progress: float = 1.0, multiple: int = 1
) -> tuple[int, int]:
    """Height and width of augmented pictures, the same for all rows of an optimizer step.

    Args:
        size: Height and width of the stored pictures.
        progress: Share of the run that is done.
        multiple: The backbone's patch side; a reduced side is the multiple of it that is nearest, at least one.
    """
    share = config.curriculum.resolution.at(progress)
    height, width = size
    if share == 1:
        return height, width
    return _rounded(height, share, multiple), _rounded(width, share, multiple)


def _rounded(side: int, share: float, multiple: int) -> int:
    return min(side, max(1, round(side * share / multiple)) * multiple)


def _signed(drawn: float, largest: float) -> float:
    """A number between -largest and largest."""
    return (2.0 * drawn - 1.0) * largest


def _warp(
    picture_HW3: Picture, config: AugmentConfig, drawn: _Draws, trials: list[float], strength: float
) -> warping.Warp:
    height, width = picture_HW3.shape[:2]
    box = warping.Box(0.0, 0.0, float(height), float(width))
    if config.crop_scale is not None:
        least, largest = (1.0 - (1.0 - share) * strength for share in config.crop_scale)
        ratio = tuple(bound**strength for bound in config.crop_ratio)
        crop_h, crop_w = rectangle((height, width), (least, largest), (ratio[0], ratio[1]), trials) or (height, width)
        box = warping.Box(drawn.crop_y * (height - crop_h), drawn.crop_x * (width - crop_w), crop_h, crop_w)
    return warping.Warp(
        box=box,
        flip_x=drawn.horizontal_flip < config.horizontal_flip,
        flip_y=drawn.vertical_flip < config.vertical_flip,
        degrees=_signed(drawn.rotation, config.rotation * strength),
        shear_degrees=_signed(drawn.shear, config.shear * strength),
        shift_x=_signed(drawn.translate_x, config.translate * strength) * width,
        shift_y=_signed(drawn.translate_y, config.translate * strength) * height,
    )


def rectangle(
    size: tuple[int, int], area: tuple[float, float], ratio: tuple[float, float], trials: list[float]
) -> tuple[float, float] | None:
    """Height and width of the first rectangle of a random share of the area and ratio that fits; None where none does.

    Args:
        size: Height and width of the picture.
        area: Least and largest share of its area.
        ratio: Least and largest width / height, drawn evenly on a logarithmic scale.
        trials: Numbers in [0, 1), two for each trial.
    """
    height, width = size
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for share_drawn, ratio_drawn in zip(trials[::2], trials[1::2], strict=True):
        pixels = height * width * (area[0] + (area[1] - area[0]) * share_drawn)
        root = math.exp((low + (high - low) * ratio_drawn) / 2)
        found_h, found_w = math.sqrt(pixels) / root, math.sqrt(pixels) * root
        if found_h <= height and found_w <= width:
            return found_h, found_w
    return None


def _operations(
    config: AugmentConfig, rng: np.random.Generator, size: tuple[int, int], share: float, strength: float
) -> list[policies.Drawn]:
    if config.randaugment:
        return policies.randaugment(config, rng, size=size, strength=strength)
    return [policies.trivialaugment(rng, share=share, strength=strength)] if config.trivialaugment else []


def _recoloured(picture_hw3: Picture, config: AugmentConfig, drawn: _Draws, strength: float) -> Picture:
    if config.brightness or config.contrast or config.gamma:
        picture_hw3 = colour.toned(
            picture_hw3,
            brightness=1.0 + _signed(drawn.brightness, config.brightness * strength),
            contrast=1.0 + _signed(drawn.contrast, config.contrast * strength),
            exponent=(1.0 + config.gamma * strength) ** _signed(drawn.gamma, 1.0),
        )
    if config.saturation or config.hue:
        picture_hw3 = colour.tinted(
            picture_hw3,
            saturation=1.0 + _signed(drawn.saturation, config.saturation * strength),
            turn=_signed(drawn.hue, config.hue * strength),
        )
    return picture_hw3


def _erased(
    picture_hw3: Picture, config: AugmentConfig, drawn: _Draws, trials: list[float], rng: np.random.Generator
) -> Picture:
    height, width = picture_hw3.shape[:2]
    box_size = rectangle((height, width), config.erasing_area, config.erasing_ratio, trials)
    if box_size is None:
        return picture_hw3
    box_h, box_w = max(1, round(box_size[0])), max(1, round(box_size[1]))
    top, left = int(drawn.erasing_y * (height - box_h + 1)), int(drawn.erasing_x * (width - box_w + 1))
    result_hw3: Picture = picture_hw3.copy()
    box_hw3 = result_hw3[top : top + box_h, left : left + box_w]
    if config.erasing_fill == "random":
        # A grey picture gets grey noise: it must not be known by colours that others of its kind do not have.
        is_grey = bool((box_hw3[..., :1] == box_hw3).all())
        noise_shape = (box_h, box_w, 1 if is_grey else 3)
        box_hw3[...] = np.frombuffer(rng.bytes(math.prod(noise_shape)), dtype=np.uint8).reshape(noise_shape)
    else:
        box_hw3[...] = 0 if config.erasing_fill == "black" else np.rint(cv2.mean(picture_hw3)[:3])
    return result_hw3
