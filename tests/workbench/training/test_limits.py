from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.config import RunConfig
from workbench.training.limits import Limits, limits, total_steps


@dataclass
class Clock:
    """A timer whose shares are known."""

    at: float
    a_step: float = 0.0

    def share(self, *, ahead: float) -> float:
        return self.at + ahead * self.a_step

    def fits_another(self) -> bool:
        return self.at < 1


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate(
        {"recipe": "sft", "data": {"train": "rows.jsonl"}, "batch": {"size": 10}, **sections}
    )


@given(steps=st.floats(0, 50), tokens=st.floats(0, 5000), at=st.floats(0, 1))
def test_the_largest_share_counts(steps: float, tokens: float, at: float) -> None:
    found = Limits(40, 4000, Clock(at)).share(steps=steps, tokens=tokens, ahead=0)
    assert found == min(1.0, max(steps / 40, tokens / 4000, at))


def test_what_is_not_limited_counts_nothing() -> None:
    assert Limits(None).share(steps=1e9, tokens=1e9, ahead=0) == 0
    assert Limits(None, tokens=100).share(steps=1e9, tokens=25, ahead=0) == 0.25
    assert Limits(8).share(steps=2, tokens=1e9, ahead=0) == 0.25


def test_the_clock_is_asked_for_the_same_moment() -> None:
    assert Limits(None, timer=Clock(0.5, 0.1)).share(steps=0, tokens=0, ahead=-0.5) == pytest.approx(0.45)


@pytest.mark.parametrize(
    ("sections", "steps"),
    [
        ({}, 10),
        ({"train": {"epochs": 2.5}}, 25),
        ({"train": {"steps": 7, "epochs": 2.5}}, 7),
        ({"budget": {"tokens": 5000}}, None),
        ({"budget": {"tokens": 5000}, "train": {"epochs": 3}}, 30),
        ({"budget": {"time": "2h"}}, None),
        ({"budget": {"time": "2h"}, "train": {"steps": 4}}, 4),
    ],
)
def test_steps_of_a_run(sections: dict[str, Any], steps: int | None) -> None:
    assert total_steps(config(**sections), draws=95) == steps


def test_limits_of_a_configuration() -> None:
    found = limits(config(budget={"tokens": 5000}, train={"epochs": 3}), draws=95)
    assert (found.steps, found.tokens, found.timer) == (30, 5000, None)
    clock = Clock(0.0)
    assert limits(config(budget={"time": 60}), draws=95, timer=clock) == Limits(None, None, clock)


def test_a_run_that_ends_in_time_has_a_clock() -> None:
    with pytest.raises(AssertionError):
        limits(config(budget={"time": 60}), draws=95)
