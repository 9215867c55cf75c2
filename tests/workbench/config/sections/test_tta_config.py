"""Views that contradict each other, or the rows, are refused with what to write."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from workbench.config.sections.classes_config import ClassesConfig
from workbench.config.sections.tta_config import TtaConfig

TWO = {"text": "{title} {body}"}


def test_off_by_default_and_whatever_else_is_set() -> None:
    assert TtaConfig().views == () and TtaConfig(views=(), merge="vote", copies=3).refusal(ClassesConfig()) is None


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"merge": "vote", "keep": True}, "merge, keep: there are no views. Write views too, or leave this out"),
        ({"views": ["lower", "lower"]}, "duplicate entry 'lower'. Name it once"),
        ({"views": ["lower"], "copies": 2}, "copies and noise are for views typos and drop_words"),
        ({"views": ["lower"], "noise": 0.2}, "copies and noise are for views typos and drop_words"),
        ({"views": ["typos"], "noise": 1}, "less than 1"),
        ({"views": ["templates"]}, "needs templates, such as"),
        ({"views": ["lower"], "templates": ["Q: {text}"]}, "Add templates to views"),
        ({"views": ["templates"], "templates": ["no column"]}, "names no column"),
        ({"views": ["templates"], "templates": ["{a} {a}"]}, "duplicate column"),
        ({"views": ["user"]}, "needs function, the path"),
        ({"views": ["lower"], "merge": "user"}, "needs function, the path"),
        ({"views": ["lower"], "function": "mine.py"}, "Name one of them, or leave function out"),
        ({"views": ["lower"], "uncertain": 0}, "greater than 0"),
        ({"views": ["flip", "eight"]}, "Leave flip out of views"),
        ({"views": ["flip"], "crop": 0.5}, "Add five_crops to views, or leave crop out"),
        ({"views": ["flip"], "rotations": [5]}, "Add rotations to views"),
        ({"views": ["scales"], "scales": [1, 1.1]}, "must name others than 1, the row itself, such as"),
        ({"views": ["rotations"], "rotations": []}, "must name others than 0"),
        ({"views": ["scales"], "scales": [1.1, 1.1]}, "duplicate entry 1.1"),
        ({"views": ["eight", "rotations"], "rotations": [-90]}, "contains the rotation by -90 degrees"),
        ({"views": ["shifts"], "shift": 1}, "less than 1"),
    ],
)
def test_mistakes_of_the_section(values: dict[str, Any], wanted: str) -> None:
    with pytest.raises(ValidationError, match=wanted):
        TtaConfig.model_validate(values)


@pytest.mark.parametrize(
    ("values", "classes", "wanted"),
    [
        ({"views": ["swap"]}, {}, "classes.kind is one. Leave swap out"),
        ({"views": ["head"]}, {}, "head is how classes.keep=start cuts rows already"),
        ({"views": ["tail"]}, {"keep": "end"}, "tail is how classes.keep=end cuts rows already"),
        ({"views": ["templates"], "templates": ["{text}"]}, {}, "is what classes.text says already"),
        ({"views": ["templates"], "templates": ["{title}"]}, TWO, "found title"),
        ({"views": ["lower"], "merge": "max"}, {"kind": "number"}, "Write tta.merge=mean"),
        ({"views": ["lower"], "uncertain": 0.5}, {"kind": "number"}, "Leave tta.uncertain out"),
    ],
)
def test_views_that_do_not_go_with_the_rows(values: dict[str, Any], classes: dict[str, Any], wanted: str) -> None:
    found = TtaConfig.model_validate(values).refusal(ClassesConfig.model_validate(classes))
    assert found is not None and wanted in found


@pytest.mark.parametrize(
    ("values", "rows", "wanted"),
    [
        ({"views": ["flip"]}, "text", "views of pictures (flip), and rows are texts. Leave them out"),
        ({"views": ["lower", "user"], "function": "mine.py"}, "image", "views of text (lower), and rows are pictures"),
        ({"views": ["flip"], "merge": "vote"}, "image", "Write tta.merge=mean"),
        ({"views": ["speeds"]}, "image", "views of sound (speeds), and rows are pictures"),
        ({"views": ["lower"]}, "audio", "Views of sound are delays, speeds"),
    ],
)
def test_views_of_texts_and_of_pictures(values: dict[str, Any], rows: str, wanted: str) -> None:
    classes = ClassesConfig(kind="number" if "merge" in values else "one")
    found = TtaConfig.model_validate(values).refusal(classes, rows=rows)
    assert found is not None and wanted in found


def test_settings_of_texts_say_nothing_of_pictures() -> None:
    config = TtaConfig.model_validate({"views": ["eight", "five_crops", "user"], "function": "mine.py"})
    assert config.refusal(ClassesConfig(keep="end"), rows="image") is None


def test_views_that_go_with_the_rows() -> None:
    config = TtaConfig.model_validate(
        {"views": ["tail", "middle", "templates", "typos"], "templates": ["{body}\n{title}"], "copies": 4}
    )
    assert config.refusal(ClassesConfig.model_validate(TWO)) is None
    assert TtaConfig.model_validate({"views": ["swap"]}).refusal(ClassesConfig.model_validate({"kind": "pair"})) is None
