"""Schedules against the formula, written a second time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.config import ScheduleConfig
from workbench.schedules import factor

NAMES = ["linear", "cosine", "constant", "wsd"]


@given(st.sampled_from(NAMES), st.floats(0, 1), st.floats(0, 0.5), st.floats(0, 0.9))
def test_stays_between_floor_and_peak_after_warmup(name: str, progress: float, warmup: float, floor: float) -> None:
    config = ScheduleConfig(name=name, warmup=warmup, floor=floor, decay=0.3)
    value = factor(progress, config)
    assert 0 <= value <= 1
    assert value >= floor - 1e-12 or progress < warmup


@pytest.mark.parametrize("name", NAMES)
def test_ends(name: str) -> None:
    config = ScheduleConfig(name=name, warmup=0.1, floor=0.2)
    assert factor(0.0, config) == 0
    assert factor(0.05, config) == pytest.approx(0.5)
    assert factor(0.1, config) == pytest.approx(1.0)
    assert factor(1.0, config) == pytest.approx(1.0 if name == "constant" else 0.2)


@given(st.floats(0.1, 1))
def test_formulas(progress: float) -> None:
    done = (progress - 0.1) / 0.9
    linear, cosine = (ScheduleConfig(name=name, warmup=0.1) for name in ("linear", "cosine"))
    assert factor(progress, linear) == pytest.approx(1 - done, abs=1e-9)
    assert factor(progress, cosine) == pytest.approx(0.5 * (1 + math.cos(math.pi * done)), abs=1e-9)
    wsd = ScheduleConfig(name="wsd", warmup=0.1, decay=0.25)
    assert factor(progress, wsd) == pytest.approx(min(1.0, (1 - progress) / 0.25), abs=1e-9)
