"""What a person who checks a recipe sees of pictures: settings in words, pitfalls of labels, and a contact sheet.

Pitfalls are changes that can turn the picture of one label into one of another, told before a run.

Legend: H, W, 3 channels RGB of a picture; it may be grey (H, W).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import matplotlib
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from workbench.config.sections.image_config import AugmentConfig, Growth, PrepareConfig
from workbench.config.sections.tta_config import TtaConfig
from workbench.data.images.picture_format import PictureFormat
from workbench.runs.units import percent


def preparation_in_words(config: PrepareConfig, format: PictureFormat) -> str:
    """The steps that every picture goes through once, in their order."""
    return "; ".join(_steps(config, format))


def _steps(config: PrepareConfig, format: PictureFormat) -> Iterator[str]:
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


def augmentation_in_words(config: AugmentConfig) -> str:
    """The changes of training pictures, in their order; empty where there are none."""
    return "; ".join(_changes(config))


def _changes(config: AugmentConfig) -> Iterator[str]:
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
    if config.randaugment:
        yield f"RandAugment: {config.randaugment} operations of magnitude {config.randaugment_magnitude:g}"
    if config.trivialaugment:
        yield "TrivialAugment: one operation of any magnitude"
    uses_border = config.rotation or config.translate or config.shear or config.randaugment or config.trivialaugment
    if uses_border:
        filled = {"reflect": "mirrored", "edge": "filled with the nearest pixel", "black": "black"}[config.border]
        yield f"beyond the edge {filled}"
    for name in ("brightness", "contrast", "saturation"):
        if share := getattr(config, name):
            yield f"{name} ± {percent(share)}"
    if config.gamma:
        yield f"gamma from {1 / (1 + config.gamma):.2g} to {1 + config.gamma:.2g}"
    if config.hue:
        yield f"hue turned by up to {360 * config.hue:.3g} degrees"
    if config.blur:
        yield f"blur of up to {config.blur:g} pixels"
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
    grown: dict[str, Growth] = {"strength": config.curriculum.strength, "side": config.curriculum.resolution}
    for name, growth in grown.items():
        if growth.start < 1:
            yield f"{name} grows from {percent(growth.start)} to 100 % in the first {percent(growth.until)} of the run"


_SIDES = {"left": "right", "east": "west"}
_HEIGHTS = {"up": "down", "top": "bottom", "upper": "lower", "above": "below", "north": "south", "upward": "downward"}
_SENSES = {"clockwise": "counterclockwise"}
_FLIPPED_X = {**_SIDES, **_SENSES, "b": "d", "p": "q"}
_FLIPPED_Y = {**_HEIGHTS, **_SENSES, "6": "9", "b": "p", "d": "q", "m": "w", "M": "W", "n": "u"}
_HALF_TURN = {**_SIDES, **_HEIGHTS, "6": "9", "b": "q", "d": "p", "m": "w", "M": "W", "n": "u"}
_TURNED = {**_HALF_TURN, "horizontal": "vertical"}
"""Words of labels that a change exchanges, each pair once; single letters are told apart by their case."""
_COLOURS = frozenset(
    {"red", "orange", "yellow", "green", "cyan", "blue", "purple", "violet", "magenta", "pink", "brown"}
)
LEAST_TURN = 90.0  # degrees from which a rotation exchanges labels
LEAST_HUE = 0.05
"""Share of a turn of the colour circle from which a colour becomes its neighbour; red and yellow are 1/6 apart."""


@dataclass(frozen=True)
class _Change:
    """A setting that is on, and the words of labels that it exchanges."""

    setting: str
    cure: str
    effect: str
    tables: tuple[Mapping[str, str], ...]  # pairs of words, in a table for each way of exchanging them at once
    mirrors: bool = False  # whether it shows mirror images, which letters and digits do not have


def pitfalls(config: AugmentConfig, tta: TtaConfig, names: Sequence[str], *, grey: bool = False) -> list[str]:
    """Sentences about changes that may be wrong for these labels, each with what to write; none where all is well.

    Args:
        config: How training pictures are augmented.
        tta: Views at test time.
        names: Names of the classes.
        grey: Whether no picture has colours.
    """
    exchanged = [sentence for change in _exchanging(config, tta) for sentence in _exchanged(change, names)]
    return exchanged + list(_of_colours(config, names, grey=grey))


def _exchanging(config: AugmentConfig, tta: TtaConfig) -> Iterator[_Change]:
    place = "image.augment."
    if config.horizontal_flip:
        cure = f"Write {place}horizontal_flip=0"
        yield _Change(f"{place}horizontal_flip", cure, "mirrored", (_FLIPPED_X,), mirrors=True)
    if config.vertical_flip:
        cure = f"Write {place}vertical_flip=0"
        upside_down = (_FLIPPED_Y, _HALF_TURN) if config.horizontal_flip else (_FLIPPED_Y,)
        yield _Change(f"{place}vertical_flip", cure, "upside down", upside_down, mirrors=True)
    if config.rotation >= LEAST_TURN:
        cure = f"Write {place}rotation=15 or less"
        yield _Change(f"{place}rotation={config.rotation:g}", cure, "turned", (_TURNED,))
    if config.trivialaugment:
        cure = f"Write {place}randaugment=2, which turns by 30 degrees at most, and {place}trivialaugment=false"
        yield _Change(f"{place}trivialaugment", cure, "turned by up to 135 degrees", (_TURNED,))
    if "flip" in tta.views:
        yield _Change("tta.views: flip", "Leave flip out", "mirrored", (_FLIPPED_X,), mirrors=True)
    if "eight" in tta.views:
        tables = (_TURNED, _FLIPPED_X, _FLIPPED_Y)
        yield _Change("tta.views: eight", "Leave eight out", "turned or mirrored", tables, mirrors=True)
    if "rotations" in tta.views and any(abs(each) >= LEAST_TURN for each in tta.rotations):
        yield _Change("tta.rotations", "Write smaller ones", "turned", (_TURNED,))


def _exchanged(change: _Change, names: Sequence[str]) -> Iterator[str]:
    pairs = list(dict.fromkeys(pair for table in change.tables for pair in _pairs(table, names)))
    if pairs:
        (first, second), more = pairs[0], len(pairs) - 1
        others = f", and {more} other pairs of labels" if more > 1 else ", and another pair of labels" if more else ""
        yield (
            f"{change.setting}: {change.effect}, a picture of `{first}` may look like `{second}`{others}. "
            f"{change.cure}, unless labels stay what they are."
        )
    elif change.mirrors and len(names) > 1 and all(len(name) == 1 and name.isalnum() for name in names):
        yield (
            f"{change.setting}: the labels look like digits or letters, most of which have no mirror image. "
            f"{change.cure}, unless the pictures show something else."
        )


def _pairs(table: Mapping[str, str], names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Pairs of labels that become each other where all words of a table are exchanged, each pair once."""
    known = {_words(name): name for name in names}
    both = {**table, **{second: first for first, second in table.items()}}
    if any(int(word) > 9 for name in names for word in _words(name) if word.isdecimal()):
        both = {word: other for word, other in both.items() if not word.isdigit()}
    for words, name in known.items():
        other = known.get(tuple(both.get(word, word) for word in words))
        if other is not None and name != other and names.index(name) < names.index(other):
            yield name, other


def _of_colours(config: AugmentConfig, names: Sequence[str], *, grey: bool) -> Iterator[str]:
    given = [name for name in ("saturation", "hue") if getattr(config, name)]
    if grey and given:
        settings = " and ".join(f"image.augment.{name}" for name in given)
        yield f"{settings}: all pictures are grey, so that nothing changes. Leave it out."
    named = [name for name in names if _COLOURS & {word.lower() for word in _words(name)}]
    if config.hue > LEAST_HUE and len(named) > 1 and not grey:
        yield (
            f"image.augment.hue={config.hue:g}: it turns one colour into another, and labels name colours "
            f"(`{named[0]}`, `{named[1]}`). Write image.augment.hue={LEAST_HUE:g} or less."
        )


def _words(name: str) -> tuple[str, ...]:
    """Words and numbers of a label, in lower case except single letters."""
    words = (word if len(word) == 1 else word.lower() for word in re.findall(r"[^\W\d_]+|\d+", name))
    return tuple("counterclockwise" if word == "anticlockwise" else word for word in words)


CELL = 192  # pixels of the square that a picture is fitted into
_GAP = 10
_HEADING, _CAPTION = 15, 12
_INK, _FAINT, _PAPER = (30, 30, 30), (105, 105, 105), (255, 255, 255)


def contact_sheet(
    rows: Sequence[tuple[str, Sequence[tuple[str, NDArray[np.uint8]]]]], *, note: str = ""
) -> Image.Image:
    """Draw titled rows of captioned pictures.

    Small pictures are enlarged by whole factors without smoothing, so that their pixels can be seen. Raises ValueError:
    there is nothing to draw.

    Args:
        rows: Of each picture a title, such as its file and label, and its states: a caption, such as the step that led
            to it, and the pixels, which may have another size than those of its neighbours.
        note: A line below them.
    """
    columns = max((len(cells) for _, cells in rows), default=0)
    if not columns:
        raise ValueError("no picture to draw")
    line = _HEADING + _CAPTION + CELL + 3 * _GAP
    width = max(columns * (CELL + _GAP) + _GAP, 360)
    bottom = len(rows) * line + _GAP
    sheet = Image.new("RGB", (width, bottom + (_HEADING + _GAP if note else 0)), _PAPER)
    pen = ImageDraw.Draw(sheet)
    for number, (title, cells) in enumerate(rows):
        top = _GAP + number * line
        pen.text((_GAP, top), shortened(title, _HEADING, width - 2 * _GAP), fill=_INK, font=_font(_HEADING))
        for column, (caption, picture) in enumerate(cells):
            left = _GAP + column * (CELL + _GAP)
            text_top = top + _HEADING + _GAP // 2
            pen.text((left, text_top), shortened(caption, _CAPTION, CELL), fill=_FAINT, font=_font(_CAPTION))
            image = Image.fromarray(picture).convert("RGB")
            factor = CELL / max(image.size)
            if factor >= 1:
                size = (image.width * int(factor), image.height * int(factor))
            else:
                size = (max(1, round(image.width * factor)), max(1, round(image.height * factor)))
            fitted = image.resize(size, Image.Resampling.NEAREST if factor >= 1 else Image.Resampling.LANCZOS)
            sheet.paste(fitted, (left, text_top + _CAPTION + _GAP // 2))
    if note:
        pen.text((_GAP, bottom), shortened(note, _HEADING, width - 2 * _GAP), fill=_INK, font=_font(_HEADING))
    return sheet


def shortened(text: str, height: int, width: int) -> str:
    """`text` on one line, with its middle left out where it is wider than so many pixels."""
    text = " ".join(text.split())
    font = _font(height)
    if font.getlength(text) <= width:
        return text
    for kept in range(len(text) - 1, 1, -1):
        short = f"{text[: (kept + 1) // 2]}…{text[len(text) - kept // 2 :]}"
        if font.getlength(short) <= width:
            return short
    return "…"


@cache
def _font(height: int) -> ImageFont.FreeTypeFont:
    """DejaVu Sans, which comes with matplotlib and has more alphabets than Pillow's own font."""
    return ImageFont.truetype(Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"), height)
