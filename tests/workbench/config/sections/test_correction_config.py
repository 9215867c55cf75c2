"""The section of corrections: when it is on, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.config.sections.correction_config import CorrectionConfig
from workbench.config.sections.folds_config import FoldsConfig
from workbench.errors import ConfigError
from workbench.schema import parse


def test_off_unless_neighbours_are_asked() -> None:
    assert not CorrectionConfig().is_on and CorrectionConfig().candidates == ()
    assert CorrectionConfig(neighbours=7).candidates == (7,)
    assert CorrectionConfig(neighbours=(20, 5)).candidates == (5, 20)


def test_what_neighbours_are_asked() -> None:
    assert CorrectionConfig().asked == ()
    assert CorrectionConfig(neighbours=7).asked == ("predictions", "labels")
    assert CorrectionConfig(neighbours=7, ask="labels").asked == ("labels",)


def test_a_given_strength_is_kept_without_a_gain() -> None:
    assert CorrectionConfig(neighbours=7, strength=0.5).is_forced
    assert not CorrectionConfig(neighbours=7, temperature=0.5).is_forced


@pytest.mark.parametrize("values", [{}, {"neighbours": 3}, {"neighbours": [3, 9], "strength": 0.5, "temperature": 2}])
def test_what_a_run_writes_is_read_again(values: dict[str, Any]) -> None:
    config = parse(CorrectionConfig, values, source="my.yaml")
    assert parse(CorrectionConfig, config.model_dump(mode="json"), source="config.yaml") == config


@pytest.mark.parametrize(
    ("values", "cure"),
    [
        ({"neighbours": []}, "Write neighbours: "),
        ({"neighbours": [5, 5]}, "Name it once"),
        ({"neighbours": 0}, "greater than 0"),
        ({"neighbours": 5, "strength": 1.5}, "strength: expected less than or equal to 1"),
        ({"neighbours": 5, "strength": 0}, "strength: expected greater than 0"),
        ({"neighbours": 5, "temperature": 0}, "temperature: expected greater than 0"),
        ({"neighbours": 5, "ask": "everybody"}, "ask"),
        ({"strength": 0.5}, "Write neighbours: "),
        ({"neighbours": 5, "strength": 0.5, "least_gain": 0.1}, "Leave one of them out"),
        ({"neighbors": 5}, "Did you mean `neighbours`"),
    ],
)
def test_mistakes_name_their_cure(values: dict[str, Any], cure: str) -> None:
    with pytest.raises(ConfigError, match=cure):
        parse(CorrectionConfig, values, source="my.yaml")


def test_a_row_has_one_fold() -> None:
    refused = CorrectionConfig(neighbours=5).refusal(FoldsConfig(repeats=2))
    assert refused is not None and "Write folds.repeats=1" in refused
    assert CorrectionConfig(neighbours=5).refusal(FoldsConfig()) is None
    assert CorrectionConfig().refusal(FoldsConfig(repeats=2)) is None
