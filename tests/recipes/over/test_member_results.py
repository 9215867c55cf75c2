"""Scores over seeds are those that numpy and scipy give, of each combination of the other settings by itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from workbench.recipes.over.member_results import over_seeds, statistics

SCORES = st.lists(st.floats(-1e3, 1e3).map(lambda value: round(value, 3)), min_size=2, max_size=12)


@given(SCORES)
def test_statistics_are_those_of_numpy_and_scipy(values: list[float]) -> None:
    found = statistics(values)
    assert found["mean"] == pytest.approx(np.mean(values), abs=1e-9) and found["seeds"] == len(values)
    assert found["sd"] == pytest.approx(np.std(values, ddof=1), abs=1e-9)
    if found["sd"] > 1e-9:
        interval = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))
        assert (found["low"], found["high"]) == pytest.approx(interval, abs=1e-9)
    assert statistics([*values, None, math.nan, math.inf]) == found, "what is no number says nothing"


def test_one_seed_says_nothing_of_others() -> None:
    assert statistics([0.5]) == {"mean": 0.5, "sd": None, "low": None, "high": None, "seeds": 1}
    assert statistics([None]) == {"mean": None, "sd": None, "low": None, "high": None, "seeds": 0}


def test_each_combination_of_other_settings_has_its_own() -> None:
    def member(rate: float, seed: int, **scores: float) -> dict[str, Any]:
        return {"settings": {"rate": rate, "seed": seed}, "scores": {"after": scores} if scores else {}}

    members = [member(0.1, 0, f1=0.2, f1_low=0.1), member(0.1, 1, f1=0.4), member(0.2, 0, f1=1.0), member(0.2, 1)]
    first, second = over_seeds(members)
    assert first == {"settings": {"rate": 0.1}, "scores": {"after": {"f1": statistics([0.2, 0.4])}}}
    assert second["scores"]["after"]["f1"]["seeds"] == 1, "the other member failed"
