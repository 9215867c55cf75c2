from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.config import RunConfig
from workbench.runs import deadline
from workbench.runs.deadline import Deadline
from workbench.training.optim.schedules import Limits, limits, total_steps


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate(
        {"recipe": "sft", "data": {"train": "rows.jsonl"}, "batch": {"size": 10}, **sections}
    )


@given(steps=st.floats(0, 50), tokens=st.floats(0, 5000), done=st.floats(0, 1))
def test_the_largest_share_counts(steps: float, tokens: float, done: float) -> None:
    found = Limits(40, 4000).share(done, steps=steps, tokens=tokens, part=1)
    assert found == min(1.0, max(steps / 40, tokens / 4000, done))


def test_what_is_not_limited_counts_nothing() -> None:
    assert Limits(None).share(0, steps=1e9, tokens=1e9, part=1) == 0
    assert Limits(None, tokens=100).share(0, steps=1e9, tokens=25, part=1) == 0.25
    assert Limits(8).share(0, steps=2, tokens=1e9, part=1) == 0.25


@pytest.mark.parametrize("part", [0.5, 1.0])
def test_the_clock_is_asked_for_the_same_part_of_a_step(part: float) -> None:
    now = [0.0]
    clock = Deadline(100 / (1 - deadline.SPARE), began=0.0, clock=lambda: now[0])
    clock.begin(0.0)
    now[0] = 10.0
    clock.stepped()
    assert Limits(None, deadline=clock).share(0.0, steps=0, tokens=0, part=part) == pytest.approx(part / 10)


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
    clock = Deadline()
    assert limits(config(budget={"tokens": 5000}, train={"epochs": 3}), 95, clock) == Limits(30, 5000, clock)
    clock = Deadline(60.0)
    assert limits(config(budget={"time": 60}), 95, clock) == Limits(None, None, clock)


def test_a_run_that_ends_in_time_has_a_clock() -> None:
    with pytest.raises(AssertionError):
        limits(config(budget={"time": 60}), 95, Deadline())
