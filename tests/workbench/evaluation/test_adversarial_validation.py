"""Rows of one distribution are not told apart, planted differences are found by name, and copies fool nobody."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.workbench.data.images.pictures import encoded, photograph
from workbench.data.text.quality.rules import RowText
from workbench.data.text.quality.survey import SourceRows
from workbench.evaluation.adversarial_validation import RowShift, compare

WORDS = [f"{first}{last}" for first in ("rain", "sun", "tree", "road", "dog") for last in ("", "y", "er", "ing")]


def texts(count: int, seed: int) -> list[str]:
    draw = np.random.default_rng(seed)
    return [" ".join(draw.choice(WORDS, 8 + draw.integers(6))) + "." for _ in range(count)]


def source(title: str, rows: Sequence[str]) -> SourceRows:
    named = [RowText(f"{title}.csv, row {number}", text) for number, text in enumerate(rows, start=1)]
    return SourceRows(title, title, named, np.zeros(len(rows), np.int64), title == "Train")


def pictures(title: str, files: Sequence[NDArray[np.uint8]], suffix: str = "png") -> SourceRows:
    named = [RowText(f"{title}-{number}.{suffix}", "") for number, _ in enumerate(files)]
    return SourceRows(
        *(title, title, named, None, title == "Train"),
        sizes=[(each.shape[0], each.shape[1]) for each in files],
        jpeg=lambda row: encoded(files[row], "JPEG"),
    )


def told(rows: Sequence[str]) -> RowShift:
    return compare([source("Train", texts(150, 0))], source("Test", rows), seed=0)


@pytest.mark.parametrize(
    "rows",
    [
        texts(120, 1),
        texts(150, 0),
        [*texts(150, 0)[:60], *texts(60, 1)],
        [*texts(150, 0)[:5] * 20, *texts(80, 1)],
        [*texts(5, 2) * 20, *texts(80, 1)],
    ],
    ids=["others", "copies", "half copies", "a few copied often", "a few of its own, often"],
)
def test_rows_alike_are_not_told_apart(rows: list[str]) -> None:
    shift = told(rows)
    assert shift.low is not None and shift.high is not None and shift.low <= 0.5 <= shift.high
    assert not shift.differences and "does not tell them apart" in shift.sentence


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda text: f"{text} zebra" if len(text) % 2 else text, "`zebra`"),
        (str.upper, "share of capitals among letters"),
        (lambda text: f"{text} {text}", "words"),
        (lambda text: f"{text} {len(text)}", "share of digits"),
        (lambda text: text.rstrip("."), "`.`"),
        (lambda text: text.replace(" ", "\n", 2), "lines"),
    ],
)
def test_a_planted_difference_is_found_by_name_also_among_copies(change: Callable[[str], str], name: str) -> None:
    for copies in (0, 60):
        shift = told([*texts(150, 0)[:copies], *map(change, texts(120, 1))])
        assert shift.differs and name in [each.name for each in shift.differences[:3]]
        assert name in shift.sentence and "Scores on folds" in shift.sentence


def test_a_word_that_test_rows_have_is_named() -> None:
    shift = told([f"{text} zebra" if number % 3 else text for number, text in enumerate(texts(60, 1))])
    assert shift.differs and [each.name for each in shift.differences] == ["`zebra`"]


def test_few_rows_say_nothing() -> None:
    for rows in (texts(29, 1), texts(10, 1) * 9, [""] * 50):
        shift = told([row.upper() for row in rows])
        assert shift.auc is None and not shift.differs and "too few" in shift.sentence


def _dark(picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return picture // 2


def _grey(picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.repeat(picture.mean(axis=2, keepdims=True), 3, axis=2).astype(np.uint8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "suffix", "name"),
    [
        (lambda picture: picture, "png", None),
        (_dark, "png", "brightness"),
        (_grey, "png", "colourfulness"),
        (lambda picture: picture[:30], "png", "height"),
        (lambda picture: picture, "bmp", "`bmp`"),
    ],
)
def test_pictures_differ_by_what_is_seen(change: Callable[..., NDArray[np.uint8]], suffix: str, name: str) -> None:
    train = pictures("Train", [photograph(40, 48, seed=number) for number in range(60)])
    other = pictures("Test", [change(photograph(40, 48, seed=number)) for number in range(100, 150)], suffix)
    shift = compare([train], other, seed=0)
    assert shift.differs == (name is not None)
    assert name is None or name in [each.name for each in shift.differences[:3]]
