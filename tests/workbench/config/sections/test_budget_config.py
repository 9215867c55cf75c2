from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from workbench.config.sections.budget_config import BudgetConfig


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("90m", 5400),
        ("1h30m", 5400),
        ("45s", 45),
        ("2d", 172800),
        ("1.5h", 5400),
        ("1h 5s", 3605),
        (60, 60),
        (0.5, 0.5),
    ],
)
def test_times(written: Any, seconds: float) -> None:
    assert BudgetConfig(time=written).seconds == seconds


@given(h=st.integers(0, 99), m=st.integers(0, 99), s=st.integers(1, 99))
def test_a_time_in_parts_is_their_sum(h: int, m: int, s: int) -> None:
    assert BudgetConfig.model_validate({"time": f"{h}h{m}m{s}s"}).seconds == 3600 * h + 60 * m + s


@pytest.mark.parametrize("written", ["", "m", "90x", "ninety", "30m1h", "-5m", "5", "1.2.3h", ".s"])
def test_what_is_no_time_is_refused_with_what_to_write(written: str) -> None:
    with pytest.raises(ValidationError, match="Write 90m, 1h30m, 45s, or a number of seconds"):
        BudgetConfig.model_validate({"time": written})


@pytest.mark.parametrize("written", [0, -1, "0s"])
def test_no_time_at_all_is_refused(written: Any) -> None:
    with pytest.raises(ValidationError):
        BudgetConfig.model_validate({"time": written})


def test_energy_and_money_are_time() -> None:
    assert BudgetConfig(energy=100, power=400).seconds == 900
    assert BudgetConfig(money=3, price=2).seconds == 5400
    assert BudgetConfig(time=1000.0, energy=100, power=400, money=3, price=2).seconds == 900


@pytest.mark.parametrize(
    ("given", "cure"),
    [
        ({"energy": 100}, "Write budget.power as well"),
        ({"money": 3}, "Write budget.price as well"),
        ({"power": 400}, "Write budget.energy as well"),
        ({"price": 2}, "Write budget.money as well"),
    ],
)
def test_half_a_budget_is_refused(given: dict[str, Any], cure: str) -> None:
    with pytest.raises(ValidationError, match=cure):
        BudgetConfig.model_validate(given)


def test_what_limits_a_run() -> None:
    assert BudgetConfig().unlimited
    assert not BudgetConfig().timed
    assert not BudgetConfig(tokens=5).unlimited
    assert not BudgetConfig(tokens=5).timed
    assert BudgetConfig(time="slurm").timed
    assert BudgetConfig(time="slurm").seconds is None
    assert BudgetConfig(money=1, price=1).timed
