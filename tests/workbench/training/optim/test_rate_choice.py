"""A learning rate is chosen by paired differences of late losses."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from workbench.training.optim.rate_choice import TOLERANCE, choose

RATES = [1e-4, 1e-3, 1e-2, 1e-1]
STEPS = 40


def losses(*levels: float, apart: float = 0.002) -> list[list[float]]:
    """Steps whose rows are hard or easy for all rates alike; each rate differs by its level and a little noise."""
    rows = np.random.default_rng(0).normal(3, 0.5, STEPS)
    return [
        list(rows + level + np.random.default_rng(1 + number).normal(0, apart, STEPS))
        for number, level in enumerate(levels)
    ]


def test_the_noise_of_rows_falls_out() -> None:
    """Levels that differ by a hundredth of what rows do are told apart."""
    found = choose(RATES, losses(0.3, 0.0, 0.005, 0.5), steps=STEPS)
    assert found is not None
    assert (found.best.rate, found.highest.rate, found.lowest.rate) == (1e-3, 1e-3, 1e-3)


def test_rates_within_noise_are_alike() -> None:
    tried = losses(0.3, 0.0, 0.0, 0.0)
    tried[1] = list(np.asarray(tried[1]) - 1e-4)
    found = choose(RATES, tried, steps=STEPS)
    assert found is not None and found.highest.rate == 1e-1 and found.lowest.rate == 1e-3


@pytest.mark.parametrize(("whole", "factor"), [(STEPS, 1.0), (STEPS // 2, 1.0), (None, 1.0), (4 * STEPS, 0.5)])
def test_the_middle_is_suggested_and_lower_for_longer_runs(whole: int | None, factor: float) -> None:
    tried = losses(0.3, 0.0, 0.0, 0.0)
    tried[1] = list(np.asarray(tried[1]) - 1e-4)
    found = choose(RATES, tried, steps=STEPS)
    assert found is not None and found.suggested(whole) == pytest.approx(1e-2 * factor)


def test_a_worse_rate_ends_the_range() -> None:
    found = choose(RATES, losses(0.0, -0.01, 0.2, 0.0), steps=STEPS)
    assert found is not None and found.highest.rate == 1e-3


def test_noise_excuses_no_more_than_the_tolerance() -> None:
    found = choose(RATES[:2], losses(0.0, 3 * 2 * TOLERANCE, apart=0.5), steps=STEPS)
    assert found is not None
    first, second = found.tried
    worse = max(found.tried, key=lambda each: each.mean or 0)
    assert worse.excess is not None and worse.error is not None and worse.error > worse.excess > 3 * TOLERANCE
    assert worse.alike is False and {first.alike, second.alike} == {True, False}


def test_the_interval_is_students() -> None:
    tried = losses(0.0, 0.01)
    found = choose(RATES[:2], tried, steps=STEPS)
    assert found is not None and found.late == STEPS // 2
    apart = np.subtract(tried[1], tried[0])[-found.late :]
    low, high = stats.t.interval(0.95, len(apart) - 1, loc=apart.mean(), scale=stats.sem(apart))
    assert found.tried[1].excess == pytest.approx((low + high) / 2)
    assert found.tried[1].error == pytest.approx((high - low) / 2)


def test_what_exploded_is_never_suggested() -> None:
    tried = losses(0.1, 0.0, 0.0, 0.0)
    tried[2] = tried[2][:7]
    tried[3][-1] = float("nan")
    found = choose(RATES, tried, steps=STEPS)
    assert found is not None and found.highest.rate == 1e-3
    assert [each.mean is None for each in found.tried] == [False, False, True, True]
    assert choose(RATES, [own[:3] for own in tried], steps=STEPS) is None
