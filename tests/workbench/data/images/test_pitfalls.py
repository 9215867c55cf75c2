"""A change that exchanges two labels is told, with what to write; other labels and changes are not bothered."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.config.sections.image_config import AugmentConfig
from workbench.config.sections.tta_config import TtaConfig
from workbench.data.images.picture_checks import pitfalls

DIGITS = [str(number) for number in range(10)]
ANIMALS = ["cat", "dog", "left-over", "top model"]


def told(augment: dict[str, Any], names: list[str], tta: dict[str, Any] | None = None, **facts: bool) -> list[str]:
    return pitfalls(AugmentConfig.model_validate(augment), TtaConfig.model_validate(tta or {}), names, **facts)


@pytest.mark.parametrize(
    ("augment", "tta", "names", "pair", "cure"),
    [
        ({"vertical_flip": 0.5}, {}, DIGITS, "`6` may look like `9`", "Write image.augment.vertical_flip=0"),
        ({"rotation": 90}, {}, DIGITS, "`6` may look like `9`", "rotation=15 or less"),
        ({"trivialaugment": True}, {}, DIGITS, "`6` may look like `9`", "Write image.augment.randaugment=2"),
        ({}, {"views": ["eight"]}, DIGITS, "`6` may look like `9`", "Leave eight out"),
        ({}, {"views": ["rotations"], "rotations": [180]}, DIGITS, "`6` may look like `9`", "Write smaller ones"),
        ({"horizontal_flip": 1}, {}, ["turn left", "turn right"], "`turn left` may look like `turn right`", "flip=0"),
        ({"horizontal_flip": 1}, {}, ["b", "d", "x"], "`b` may look like `d`", "flip=0"),
        ({}, {"views": ["flip"]}, ["Left_hand", "right hand"], "`Left_hand`", "Leave flip out"),
        ({"vertical_flip": 1}, {}, ["thumbs_up", "thumbs_down"], "`thumbs_up`", "vertical_flip=0"),
        ({"vertical_flip": 1}, {}, ["clockwise", "counterclockwise"], "`clockwise`", "vertical_flip=0"),
        ({"vertical_flip": 1, "horizontal_flip": 1}, {}, ["b", "q"], "`b` may look like `q`", "vertical_flip=0"),
        ({"horizontal_flip": 1}, {}, ["anticlockwise", "clockwise"], "`anticlockwise`", "horizontal_flip=0"),
        ({"rotation": 180}, {}, ["top left", "bottom right"], "`top left` may look like `bottom right`", "rotation=15"),
        ({}, {"views": ["eight"]}, ["b", "d"], "`b` may look like `d`", "Leave eight out"),
        ({}, {"views": ["eight"]}, ["b", "p"], "`b` may look like `p`", "Leave eight out"),
        ({"rotation": 180}, {}, ["horizontal", "vertical"], "`horizontal`", "rotation=15"),
    ],
)
def test_labels_that_a_change_exchanges(
    augment: dict[str, Any], tta: dict[str, Any], names: list[str], pair: str, cure: str
) -> None:
    sentences = told(augment, names, tta)
    assert sum(pair in sentence and cure in sentence for sentence in sentences) == 1


def test_more_pairs_are_counted() -> None:
    (sentence,) = told({"rotation": 180}, ["b", "q", "d", "p", "n", "u"])
    assert "and 2 other pairs of labels" in sentence


@pytest.mark.parametrize(
    ("augment", "names"),
    [
        ({"vertical_flip": 0.5, "horizontal_flip": 0.5, "rotation": 180}, ANIMALS),
        ({"rotation": 20, "preset": "light"}, DIGITS),
        ({"vertical_flip": 0.5}, [f"class {number}" for number in range(20)]),
        ({"horizontal_flip": 0.5}, ["left", "middle"]),
        ({"rotation": 180}, ["B", "Q", "D", "P"]),
        ({"rotation": 180}, ["clockwise", "counterclockwise"]),
        ({"horizontal_flip": 0.5}, ["top left", "bottom right"]),
        ({"rotation": 180}, []),
        ({"hue": 0.02, "saturation": 1}, ["red", "blue"]),
        ({"hue": 0.5}, ["red wine", "dog"]),
    ],
)
def test_nothing_is_told_where_all_is_well(augment: dict[str, Any], names: list[str]) -> None:
    assert told(augment, names) == []


def test_mirrored_letters_and_digits() -> None:
    (sentence,) = told({"horizontal_flip": 0.5}, ["0", "1", "2"])
    assert "look like digits or letters" in sentence and "horizontal_flip=0" in sentence


def test_colours() -> None:
    (sentence,) = told({"hue": 0.2}, ["red card", "Yellow card"])
    assert "(`red card`, `Yellow card`)" in sentence and "hue=0.05 or less" in sentence
    (sentence,) = told({"hue": 0.2, "saturation": 0.2}, ["cat", "dog"], grey=True)
    assert "image.augment.saturation and image.augment.hue: all pictures are grey" in sentence
