"""The section of pseudo-labels: what it refuses, and how much a row counts in which round."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.config.sections.classes_config import Kind
from workbench.config.sections.pseudo_label_config import PseudoLabelConfig
from workbench.errors import ConfigError
from workbench.schema import parse


def test_off_unless_a_file_is_named() -> None:
    assert PseudoLabelConfig().unlabelled is None
    assert PseudoLabelConfig().refusal("number") is None


@pytest.mark.parametrize(
    ("values", "cure"),
    [
        ({"adaptive": True, "threshold": 0.4}, "Write floor: 0.4 or less"),
        ({"threshold": 1.2}, "threshold: expected less than or equal to 1"),
        ({"unlabelled": ""}, "unlabelled: expected at least 1 character"),
        ({"cap": 0}, "cap: expected greater than 0"),
        ({"treshold": 0.9}, "Did you mean `threshold`"),
    ],
)
def test_mistakes_name_their_cure(values: dict[str, Any], cure: str) -> None:
    with pytest.raises(ConfigError, match=cure):
        parse(PseudoLabelConfig, values, source="my.yaml")


def test_a_fixed_threshold_may_be_below_the_floor_of_the_adaptive_one() -> None:
    assert PseudoLabelConfig(threshold=0.0).threshold == 0


@pytest.mark.parametrize("kind", ["one", "pair", "several", "number"])
def test_only_rows_of_one_class_get_pseudo_labels(kind: Kind) -> None:
    said = PseudoLabelConfig(unlabelled="more.csv").refusal(kind)
    if kind in ("one", "pair"):
        assert said is None
    else:
        assert said is not None and kind in said and "Leave pseudo_label.unlabelled out" in said


def test_weight_rises_to_its_full_value_and_stays() -> None:
    config = PseudoLabelConfig(weight=0.6, ramp_up=3)
    assert [config.weight_in(number) for number in range(1, 6)] == pytest.approx([0.2, 0.4, 0.6, 0.6, 0.6])
    assert PseudoLabelConfig(weight=0.6).weight_in(1) == 0.6
