"""Presets fill what is left out; contradictions are refused with what to write; growth ends at all of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from workbench.config.sections.image_config import PRESETS, AugmentConfig, Growth


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_same_as_its_settings_and_loads_again(name: str) -> None:
    config = AugmentConfig.model_validate({"preset": name})
    assert config.model_copy(update={"preset": "none"}) == AugmentConfig.model_validate(PRESETS[name])
    assert AugmentConfig.model_validate(config.model_dump()) == config
    assert config.is_on is (name != "none")


def test_a_setting_goes_before_its_preset() -> None:
    config = AugmentConfig.model_validate({"preset": "light", "rotation": 0})
    assert config.rotation == 0 and config.contrast == 0.2


@pytest.mark.parametrize(
    "settings, sentence",
    [
        (
            {"randaugment": 2, "trivialaugment": True},
            "Write image.augment.randaugment=0 or image.augment.trivialaugment=false",
        ),
        (
            {"preset": "strong", "randaugment": 2},
            "Write image.augment.randaugment=0 or image.augment.trivialaugment=false",
        ),
        ({"horizontal_flip": True}, "Write a number, such as 0.5"),
        ({"randaugment_magnitude": 12}, "Add randaugment=2"),
        ({"crop_ratio": [1, 1]}, "Add crop_scale=[0.5,1]"),
        ({"border": "black"}, "rotation=10 or translate=0.1"),
        ({"erasing_fill": "mean"}, "Add erasing=0.25"),
        ({"mix_probability": 0.5}, "Add mixup=0.2 or cutmix=1"),
        ({"crop_scale": [1, 0.5]}, r"Write [0.5, 1]"),
        ({"crop_scale": [0, 1]}, "greater than 0"),
        ({"rotation": 200}, "less than or equal to 180"),
        ({"hue": 0.6}, "less than or equal to 0.5"),
        ({"horizontal_flip": 1.5}, "less than or equal to 1"),
        ({"curriculum": {"strength": {"start": 0.5}}}, "nothing to grow"),
        ({"horizontal_flip": 0.5, "curriculum": {"strength": {"start": 0.5}}}, "nothing to grow"),
        ({"curriculum": {"resolution": {"until": 0.5}}}, "Write curriculum.resolution.start=0.5"),
    ],
)
def test_contradictions_are_refused_with_what_to_write(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError) as caught:
        AugmentConfig.model_validate(settings)
    assert sentence in str(caught.value)


@given(st.floats(0.01, 1), st.floats(0.01, 1), st.none() | st.integers(1, 20), st.floats(0, 1), st.floats(0, 1))
def test_growth_never_falls_and_ends_at_exactly_one(
    start: float, until: float, steps: int | None, first: float, second: float
) -> None:
    growth = Growth(start=start, until=until, steps=steps)
    earlier, later = sorted([first, second])
    assert start <= growth.at(earlier) <= growth.at(later) <= 1
    assert growth.at(0.0) == start and growth.at(until) == growth.at(1.0) == 1
    if steps is not None:
        level = (growth.at(first) - start) / max(1 - start, 1e-9) * steps
        assert level == pytest.approx(round(level), abs=1e-5)


def test_steps_that_are_due_are_taken() -> None:
    growth = Growth(start=0.5, until=1.0, steps=10)
    assert [growth.at(step / 10) for step in range(11)] == pytest.approx([0.5 + step / 20 for step in range(11)])


def test_false_is_off() -> None:
    assert AugmentConfig.model_validate({"preset": "strong", "horizontal_flip": False}).horizontal_flip == 0
