"""Random changes of training pictures: a pure function of seed, epoch, row, repeat and progress.

Crops, flips, turns, shears and shifts in one interpolation; tone, colour and blur; RandAugment (Cubuk et al. 2020) and
TrivialAugment (Müller & Hutter 2021), which draw operations from a list of 14; mixup (Zhang et al. 2018) and CutMix
(Yun et al. 2019). Micro-batches, worker processes, ranks and resumed runs draw the same, because nothing is kept
between two calls.

Legend: N rows, C classes, H and W of the stored picture, h and w of the augmented one, 3 channels RGB. A pixel's
coordinates are those of its centre. A grey picture, whose channels are equal, stays grey.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import cv2
import numpy as np
from numpy.typing import NDArray

from workbench.config.sections.image_config import AugmentConfig

Purpose = Literal["augment", "mix", "partners"]

_TAGS: dict[Purpose, int] = {"augment": 0x61756E, "mix": 0x6D6978, "partners": 0x706172}
"""Keep the numbers of one purpose apart from those of another with the same seed."""
_WORD = 1 << 64


class _ThreadGenerators(threading.local):
    """A generator for each purpose in each thread: to set its state costs a tenth of making one."""

    def __init__(self) -> None:
        @functools.cache
        def get(purpose: Purpose, seed: int) -> tuple[np.random.Generator, dict[str, Any]]:
            # Words as one integer, low word first, not NumPy's integers, which hold one word.
            bits = np.random.Philox(key=seed % _WORD | _TAGS[purpose] << 64)
            return np.random.Generator(bits), dict(bits.state)

        self.get = get


_generators = _ThreadGenerators()


def row_generator(purpose: Purpose, *, seed: int, epoch: int, row: int, repeat: int = 0) -> np.random.Generator:
    """Generator whose numbers depend on these values alone; it is set anew by the thread's next call for the purpose.

    Philox (Salmon et al. 2011) numbers its blocks: epoch, row and repeat are the high words of the counter, so that
    streams never overlap. `repeat`: how often the row was drawn before in the same epoch, as rows of rare classes are.
    """
    made, state = _generators.get(purpose, seed)
    state["state"]["counter"][:] = 0, repeat, row, epoch
    made.bit_generator.state = state  # whose buffer is empty, as it was made
    return made


LUMA = np.array([0.299, 0.587, 0.114])  # shares of red, green and blue in brightness (ITU-R BT.601)
_YIQ = np.array([LUMA, [0.59590059, -0.27455667, -0.32134392], [0.21153661, -0.52273617, 0.31119955]])
_FROM_YIQ = np.linalg.inv(_YIQ)
_LEVELS = np.arange(256, dtype=np.float64)
LEAST_SIGMA = 0.15  # pixels below which a Gaussian leaves an 8-bit picture as it is


def looked_up(picture_HW3: NDArray[np.uint8], table: NDArray[np.float64] | NDArray[np.int64]) -> NDArray[np.uint8]:
    """Replace each level by that of a table (256,), or (256, 3) with one for each channel, rounded and clipped."""
    exact = table.astype(np.float64, copy=False)
    # The table itself, rounded and clipped in one call: a sum of weights 1 and 0.
    levels = np.asarray(cv2.addWeighted(exact, 1.0, exact, 0.0, 0.0, dtype=cv2.CV_8U)).reshape(table.shape)
    if levels.ndim == 2:
        levels = np.ascontiguousarray(levels[:, None, :])
    return np.asarray(cv2.LUT(picture_HW3, levels), dtype=np.uint8)


def toned(
    picture_HW3: NDArray[np.uint8], *, brightness: float = 1.0, contrast: float = 1.0, exponent: float = 1.0
) -> NDArray[np.uint8]:
    """Multiply levels, then their distance from the mean grey, then raise them to a power, in one rounding.

    Args:
        brightness: Factor of all levels; 0 is black.
        contrast: Factor of the distance from the mean grey of the brightened picture; 0 is grey.
        exponent: Power of the levels as shares of 255 (gamma correction); below 1 is brighter.
    """
    table = np.minimum(_LEVELS * brightness, 255.0)
    if contrast != 1.0:
        grey = mean_grey(picture_HW3) * brightness
        table = grey + contrast * (table - grey)
    if exponent != 1.0:
        table = 255.0 * (np.clip(table, 0.0, 255.0) / 255.0) ** exponent
    return looked_up(picture_HW3, table)


def tinted(picture_HW3: NDArray[np.uint8], *, saturation: float = 1.0, turn: float = 0.0) -> NDArray[np.uint8]:
    """Multiply the distance from grey and turn the hue, both at equal brightness: one matrix on the three channels.
    `saturation`: factor of the distance from grey; 0 is grey. `turn`: share of a full turn of the colour circle."""
    angle = 2 * math.pi * turn
    cosine, sine = saturation * math.cos(angle), saturation * math.sin(angle)
    chroma = np.array([[1.0, 0.0, 0.0], [0.0, cosine, -sine], [0.0, sine, cosine]])
    return np.asarray(cv2.transform(picture_HW3, _FROM_YIQ @ chroma @ _YIQ), dtype=np.uint8)


def blurred(picture_HW3: NDArray[np.uint8], sigma: float) -> NDArray[np.uint8]:
    """The picture under a Gaussian of standard deviation `sigma` in pixels, mirrored beyond its edges."""
    if sigma < LEAST_SIGMA:
        return picture_HW3
    return np.asarray(cv2.GaussianBlur(picture_HW3, (0, 0), sigma, borderType=cv2.BORDER_REFLECT_101), dtype=np.uint8)


def mean_grey(picture_HW3: NDArray[np.uint8]) -> float:
    """Mean brightness of a picture, from 0 to 255."""
    return float(LUMA @ cv2.mean(picture_HW3)[:3])


Border = Literal["reflect", "edge", "black"]

_BORDERS: dict[Border, int] = {
    "reflect": cv2.BORDER_REFLECT_101,
    "edge": cv2.BORDER_REPLICATE,
    "black": cv2.BORDER_CONSTANT,
}


class Box(NamedTuple):
    """A rectangle of a picture in pixels, whose corners may lie between pixels."""

    top: float
    left: float
    height: float
    width: float


@dataclass(frozen=True)
class Warp:
    """Crop, then flips, then shear, rotation and shift of the cropped picture, which has the size of the whole one."""

    box: Box  # the crop, which is resized to the picture's size
    flip_x: bool = False  # exchange left and right
    flip_y: bool = False  # exchange top and bottom
    degrees: float = 0.0  # rotation about the centre, counter-clockwise
    shear_degrees: float = 0.0  # horizontal shear about the centre
    shift_x: float = 0.0  # pixels to the right
    shift_y: float = 0.0  # pixels downwards

    def keeps_pixels(self, size: tuple[int, ...]) -> bool:
        """Whether flips are all that is done to a picture of this height and width."""
        moves = self.degrees or self.shear_degrees or self.shift_x or self.shift_y
        return not moves and self.box == Box(0.0, 0.0, *size)

    def inverse(self, size: tuple[int, ...]) -> NDArray[np.float64]:
        """Matrix (2, 3) from a pixel of the result to its place in the picture, both as (x, y, 1)."""
        height, width = size
        angle, slope = math.radians(self.degrees), math.tan(math.radians(self.shear_degrees))
        sine, cosine = math.sin(angle), math.cos(angle)
        across = self.box.width / width * (-1.0 if self.flip_x else 1.0)
        down = self.box.height / height * (-1.0 if self.flip_y else 1.0)
        # The inverse of the turn after the shear. Rows grow downwards, which exchanges the sines of a turn.
        xx, xy = across * (cosine - slope * sine), across * (-sine - slope * cosine)
        yx, yy = down * sine, down * cosine
        x, y = (width - 1) / 2 + self.shift_x, (height - 1) / 2 + self.shift_y
        source_x, source_y = self.box.left + (self.box.width - 1) / 2, self.box.top + (self.box.height - 1) / 2
        return np.array([[xx, xy, source_x - xx * x - xy * y], [yx, yy, source_y - yx * x - yy * y]])


def warped(picture_HW3: NDArray[np.uint8], warp: Warp, *, border: Border) -> NDArray[np.uint8]:
    """The picture after `warp`, interpolated linearly at most once; pixels are exact where flips are all it does."""
    size = picture_HW3.shape[:2]
    if warp.keeps_pixels(size):
        if not (warp.flip_x or warp.flip_y):
            return picture_HW3
        return _bytes(cv2.flip(picture_HW3, -1 if warp.flip_x and warp.flip_y else int(warp.flip_x)))
    return affine(picture_HW3, warp.inverse(size), border=border)


def affine(picture_HW3: NDArray[np.uint8], inverse: NDArray[np.float64], *, border: Border) -> NDArray[np.uint8]:
    """The picture under a matrix (2, 3) from a pixel of the result to its place in the picture, both as (x, y, 1)."""
    height, width = picture_HW3.shape[:2]
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    return _bytes(cv2.warpAffine(picture_HW3, inverse, (width, height), flags=flags, borderMode=_BORDERS[border]))


def resized_to(picture_HW3: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    """The picture with another height and width: antialiased where it shrinks, linear where it grows."""
    height, width = size
    if picture_HW3.shape[:2] == size:
        return picture_HW3
    shrinks = height <= picture_HW3.shape[0] and width <= picture_HW3.shape[1]
    how = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
    return _bytes(cv2.resize(picture_HW3, (width, height), interpolation=how))


def _bytes(picture: object) -> NDArray[np.uint8]:
    return np.asarray(picture, dtype=np.uint8)


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

MAGNITUDES = 30  # largest magnitude; there are 31, from 0
_SMOOTH = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], dtype=np.float32) / 13
_FACTORS: tuple[Operation, ...] = ("color", "contrast", "brightness", "sharpness")
_SIGNED: tuple[Operation, ...] = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y", *_FACTORS)


Drawn: TypeAlias = tuple[Operation, float]  # an operation, and its value as `apply` takes it


def randaugment(
    config: AugmentConfig, rng: np.random.Generator, *, size: tuple[int, ...], strength: float = 1.0
) -> list[Drawn]:
    """Draw `config.randaugment` operations with replacement, all of one magnitude. `size`: height and width of the
    picture. `strength`: share of the magnitude."""
    # The paper's shifts are 150 pixels of its pictures of 331 at most.
    shift_y, shift_x = (150 / 331 * side for side in size)
    largest = _largest(rotate=30.0, factor=0.9, shear=0.3, shift_x=shift_x, shift_y=shift_y, bits=4)
    magnitude = config.randaugment_magnitude / MAGNITUDES * strength
    return [_drawn(largest, magnitude, rng) for _ in range(config.randaugment)]


def trivialaugment(rng: np.random.Generator, *, share: float = 1.0, strength: float = 1.0) -> Drawn:
    """Draw one operation of one of 31 magnitudes. `share`: the picture's side as a share of the one at full resolution,
    at which shifts are 32 pixels at most. `strength`: share of the magnitude."""
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


def apply_operation(operation: Operation, picture_hw3: Picture, value: float, *, border: Border = "black") -> Picture:
    """The picture after an operation. `value`: degrees counter-clockwise, change of a factor (0 changes nothing), slope
    of a shear from the upper left corner, pixels of a shift to the right or down, bits taken away, or 256 less the
    level from which `solarize` inverts. No meaning for the others."""
    if operation == "posterize":
        return looked_up(picture_hw3, np.arange(256) & (0xFF << round(value) & 0xFF))
    if operation == "solarize":
        levels = np.arange(256)
        return looked_up(picture_hw3, np.where(levels >= 256 - value, 255 - levels, levels))
    if operation in ("autocontrast", "equalize"):
        counts = [cv2.calcHist([picture_hw3], [channel], None, [256], [0, 256])[:, 0] for channel in range(3)]
        pixels = np.stack(counts, axis=1).astype(np.int64)  # (256, 3): of each level in each channel
        highest = 255 - (pixels[::-1] > 0).argmax(0)
        if operation == "autocontrast":  # stretch each channel's levels to 0 to 255
            lowest = (pixels > 0).argmax(0)
            factor = 255 / np.maximum(highest - lowest, 1)
            table = np.where(highest > lowest, np.floor((_LEVELS[:, None] - lowest) * factor), _LEVELS[:, None])
        else:  # spread each channel's levels evenly, by Pillow's rule for rounding
            step = (pixels.sum(0) - pixels[highest, range(3)]) // 255
            below = pixels.cumsum(0) - pixels
            table = np.where(step > 0, (below + step // 2) // np.maximum(step, 1), _LEVELS[:, None])
        return looked_up(picture_hw3, table)
    if operation == "brightness":
        return toned(picture_hw3, brightness=1 + value)
    if operation == "contrast":
        return toned(picture_hw3, contrast=1 + value)
    if operation == "color":
        return tinted(picture_hw3, saturation=1 + value)
    if operation == "sharpness":
        factor = 1 + value
        smooth_hw3 = cv2.filter2D(picture_hw3, -1, _SMOOTH)
        blend_hw3 = np.asarray(cv2.addWeighted(picture_hw3, factor, smooth_hw3, 1 - factor, 0), dtype=np.uint8)
        result_hw3: Picture = picture_hw3.copy()
        result_hw3[1:-1, 1:-1] = blend_hw3[1:-1, 1:-1]
        return result_hw3
    if operation == "identity":
        return picture_hw3
    height, width = picture_hw3.shape[:2]
    if operation == "rotate":
        inverse = Warp(Box(0.0, 0.0, height, width), degrees=value).inverse((height, width))
    else:
        shear_x, shear_y, shift_x, shift_y = (
            value if operation == name else 0.0 for name in ("shear_x", "shear_y", "translate_x", "translate_y")
        )
        inverse = np.array([[1.0, shear_x, -shift_x], [shear_y, 1.0, -shift_y]])
    return affine(picture_hw3, inverse, border=border)


class PixelBox(NamedTuple):
    """A rectangle of whole pixels; bottom and right are the first ones outside."""

    top: int
    left: int
    bottom: int
    right: int

    @property
    def area(self) -> int:
        """Its pixels."""
        return (self.bottom - self.top) * (self.right - self.left)


@dataclass(frozen=True)
class MixPlan:
    """How a row is mixed with its partner."""

    partner: int
    """Number of the other row."""
    weight: float
    """Share of the row's own label, from 0 to 1; the rest is the partner's."""
    box: PixelBox | None = None
    """CutMix: the pixels that come from the partner; None: mixup, all pixels are blended by `weight`."""


def mix_partners(rows: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """The partner (N,) of each of the rows in an epoch: another row, and each row is the partner of one."""
    order_N = row_generator("partners", seed=seed, epoch=epoch, row=0).permutation(rows)
    partner_N = np.empty(rows, dtype=np.int64)
    partner_N[order_N] = np.roll(order_N, -1)  # one cycle, in which no row meets itself
    return partner_N


def mix_plan(
    config: AugmentConfig,
    *,
    seed: int,
    epoch: int,
    row: int,
    partner: int,
    size: tuple[int, int],
    repeat: int = 0,
    progress: float = 1.0,
) -> MixPlan | None:
    """How a row is mixed in an epoch; None where it is trained on as it is.

    Args:
        partner: The row's partner, of `partners`.
        size: Height and width of the augmented pictures, of `augmentation.output_size`.
        repeat: How often the row was drawn before in this epoch.
        progress: Share of the run that is done, at the optimizer step that trains on the row.
    """
    if not config.mixes or partner == row:
        return None
    rng = row_generator("mix", seed=seed, epoch=epoch, row=row, repeat=repeat)
    mixed, switch, centre_y, centre_x = rng.random(4).tolist()
    if mixed >= config.mix_probability * config.curriculum.strength.at(progress):
        return None
    cuts = switch < 0.5 if config.mixup and config.cutmix else bool(config.cutmix)
    alpha = config.cutmix if cuts else config.mixup
    weight = float(rng.beta(alpha, alpha))
    if not cuts:
        return MixPlan(partner, weight)
    height, width = size
    share, centre = 1.0 - weight, (centre_y * height, centre_x * width)
    # A box of a share of the picture's area and of its shape, less what lies beyond the picture's edges.
    half_h, half_w = height * share**0.5 / 2, width * share**0.5 / 2
    top, bottom = (min(max(round(centre[0] + side), 0), height) for side in (-half_h, half_h))
    left, right = (min(max(round(centre[1] + side), 0), width) for side in (-half_w, half_w))
    box = PixelBox(top, left, bottom, right)
    return MixPlan(partner, 1.0 - box.area / (height * width), box)


def mix(picture_hw3: NDArray[np.uint8], partner_hw3: NDArray[np.uint8], how: MixPlan) -> NDArray[np.uint8]:
    """The mixed picture of a row and its partner, both augmented and of one size."""
    if how.box is None:
        return np.asarray(cv2.addWeighted(picture_hw3, how.weight, partner_hw3, 1.0 - how.weight, 0.0), dtype=np.uint8)
    result_hw3: NDArray[np.uint8] = picture_hw3.copy()
    window = np.s_[how.box.top : how.box.bottom, how.box.left : how.box.right]
    result_hw3[window] = partner_hw3[window]
    return result_hw3


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
    rng = row_generator("augment", seed=seed, epoch=epoch, row=row, repeat=repeat)
    numbers = rng.random(len(_Draws._fields) + 4 * TRIALS).tolist()
    drawn = _Draws._make(numbers[: len(_Draws._fields)])
    trials = numbers[len(_Draws._fields) :]
    height, width = picture_HW3.shape[:2]
    box = Box(0.0, 0.0, float(height), float(width))
    if config.crop_scale is not None:
        least, largest = (1.0 - (1.0 - share) * strength for share in config.crop_scale)
        ratio = tuple(bound**strength for bound in config.crop_ratio)
        crop_h, crop_w = rectangle((height, width), (least, largest), (ratio[0], ratio[1]), trials[: 2 * TRIALS]) or (
            height,
            width,
        )
        box = Box(drawn.crop_y * (height - crop_h), drawn.crop_x * (width - crop_w), crop_h, crop_w)
    result_HW3 = warped(
        picture_HW3,
        Warp(
            box=box,
            flip_x=drawn.horizontal_flip < config.horizontal_flip,
            flip_y=drawn.vertical_flip < config.vertical_flip,
            degrees=_signed(drawn.rotation, config.rotation * strength),
            shear_degrees=_signed(drawn.shear, config.shear * strength),
            shift_x=_signed(drawn.translate_x, config.translate * strength) * width,
            shift_y=_signed(drawn.translate_y, config.translate * strength) * height,
        ),
        border=config.border,
    )
    size = output_size(picture_HW3.shape[:2], config, progress=progress, multiple=multiple)
    result_hw3 = resized_to(result_HW3, size)
    operations: list[Drawn] = []
    if config.randaugment:
        operations = randaugment(config, rng, size=size, strength=strength)
    elif config.trivialaugment:
        operations = [trivialaugment(rng, share=size[1] / picture_HW3.shape[1], strength=strength)]
    for operation, value in operations:
        result_hw3 = apply_operation(operation, result_hw3, value, border=config.border)
    if config.brightness or config.contrast or config.gamma:
        result_hw3 = toned(
            result_hw3,
            brightness=1.0 + _signed(drawn.brightness, config.brightness * strength),
            contrast=1.0 + _signed(drawn.contrast, config.contrast * strength),
            exponent=(1.0 + config.gamma * strength) ** _signed(drawn.gamma, 1.0),
        )
    if config.saturation or config.hue:
        result_hw3 = tinted(
            result_hw3,
            saturation=1.0 + _signed(drawn.saturation, config.saturation * strength),
            turn=_signed(drawn.hue, config.hue * strength),
        )
    if config.blur:
        sigma = drawn.blur * config.blur * strength * result_hw3.shape[1] / picture_HW3.shape[1]
        result_hw3 = blurred(result_hw3, sigma)
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
