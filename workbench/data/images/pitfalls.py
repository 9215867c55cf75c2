"""Changes of pictures that can turn the picture of one label into one of another, told before a run. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from workbench.config.sections.picture_augment_config import AugmentConfig
from workbench.config.sections.tta_config import TtaConfig

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
LEAST_TURN = 90.0
"""Degrees from which a rotation exchanges labels."""
LEAST_HUE = 0.05
"""Share of a turn of the colour circle from which a colour becomes its neighbour; red and yellow are 1/6 apart."""


@dataclass(frozen=True)
class _Change:
    """A setting that is on, and the words of labels that it exchanges."""

    setting: str
    cure: str
    effect: str
    tables: tuple[Mapping[str, str], ...]
    """Pairs of words, in a table for each way of exchanging them at once."""
    mirrors: bool = False
    """Whether it shows mirror images, which letters and digits do not have."""


def pitfalls(config: AugmentConfig, tta: TtaConfig, names: Sequence[str], *, grey: bool = False) -> list[str]:
    """Sentences about changes that may be wrong for these labels, each with what to write; none where all is well.

    Args:
        config: How training pictures are augmented.
        tta: Views at test time.
        names: Names of the classes.
        grey: Whether no picture has colours.
    """
    changes = [*_of_training(config), *_of_views(tta)]
    return [sentence for change in changes for sentence in _exchanged(change, names)] + list(
        _of_colours(config, names, grey=grey)
    )


def _of_training(config: AugmentConfig) -> Iterator[_Change]:
    place = "image.augment."
    if config.horizontal_flip:
        cure = f"Write {place}horizontal_flip=0"
        yield _Change(f"{place}horizontal_flip", cure, "mirrored", (_FLIPPED_X,), mirrors=True)
    if config.vertical_flip:
        cure = f"Write {place}vertical_flip=0"
        tables = (_FLIPPED_Y, _HALF_TURN) if config.horizontal_flip else (_FLIPPED_Y,)
        yield _Change(f"{place}vertical_flip", cure, "upside down", tables, mirrors=True)
    if config.rotation >= LEAST_TURN:
        cure = f"Write {place}rotation=15 or less"
        yield _Change(f"{place}rotation={config.rotation:g}", cure, "turned", (_TURNED,))
    if config.trivialaugment:
        cure = f"Write {place}randaugment=2, which turns by 30 degrees at most, and {place}trivialaugment=false"
        yield _Change(f"{place}trivialaugment", cure, "turned by up to 135 degrees", (_TURNED,))


def _of_views(tta: TtaConfig) -> Iterator[_Change]:
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
    if _has_numbers(names):
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


def _has_numbers(names: Sequence[str]) -> bool:
    """Whether names count classes, as `class 12` does, rather than show a digit."""
    return any(int(word) > 9 for name in names for word in _words(name) if word.isdecimal())


def _words(name: str) -> tuple[str, ...]:
    """Words and numbers of a label, in lower case except single letters."""
    words = (word if len(word) == 1 else word.lower() for word in re.findall(r"[^\W\d_]+|\d+", name))
    return tuple("counterclockwise" if word == "anticlockwise" else word for word in words)
