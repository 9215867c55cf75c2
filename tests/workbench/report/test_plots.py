"""A drawing must keep what matters of ten thousand points and survive any curve."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest

from workbench.report.plots import POINTS, Axis, Series, draw, thin

STEPS = np.arange(1.0, 10_001.0)


@pytest.mark.parametrize("length", [0, 1, 2, POINTS, POINTS + 1, 10_000])
def test_thin_keeps_ends_and_extremes_in_order(length: int) -> None:
    y = np.random.default_rng(length).normal(size=length)
    x, kept = thin(STEPS[:length], y)
    assert len(kept) <= POINTS
    assert (np.diff(x) > 0).all()
    if length:
        assert (x[0], x[-1], kept.min(), kept.max()) == (1, length, y.min(), y.max())
    if length <= POINTS:
        assert kept.tolist() == y.tolist()


def test_thin_keeps_every_spike() -> None:
    y = np.zeros(10_000)
    y[[17, 4242, 9001]] = 5, -5, 7
    assert {5.0, -5.0, 7.0} <= set(thin(STEPS, y)[1])


@pytest.mark.parametrize(
    "values",
    [[1.0], [0.0, 0.0], [3.0, np.nan, np.inf, 2.0], [2.0, 2.0, 1e9], [-1.0, 1.0], [1e-12, 2e-12]],
    ids=["one point", "zeros", "gaps", "explosion", "negative", "tiny"],
)
@pytest.mark.parametrize("ticks", ["number", "count", "size", "duration", "none"])
def test_any_curve_is_drawn(values: list[float], ticks: str) -> None:
    x = np.arange(float(len(values)))
    axis = Axis("label", ticks, from_zero=True)  # type: ignore[arg-type]
    plot = draw("Title", [Series("a", x, np.array(values))], x=Axis("step", "count"), y=axis)
    ElementTree.fromstring(plot.svg)


def test_nothing_finite_is_no_drawing() -> None:
    assert draw("Title", [Series("a", STEPS, np.full(10_000, np.nan))], x=Axis(), y=Axis()).svg == ""


def test_one_explosion_does_not_flatten_the_curve() -> None:
    y = np.linspace(5, 4, 50)
    calm = draw("Title", [Series("a", STEPS[:50], y)], x=Axis(), y=Axis()).svg
    y[40] = 1e9
    wild = draw("Title", [Series("a", STEPS[:50], y)], x=Axis(), y=Axis()).svg
    assert "1e+09" in wild and "1e+09" not in calm


def test_ticks_of_time_are_round() -> None:
    plot = draw("Title", [Series("a", STEPS, STEPS)], x=Axis("time", "duration"), y=Axis())
    assert {"30 min", "1 h", "1 h 30 min"} <= set(re.findall(r">([^<]+)</text>", plot.svg))


def test_ticks_keep_their_decimals() -> None:
    plot = draw("Title", [Series("a", STEPS, STEPS * 2e-8)], x=Axis(), y=Axis())
    assert "0.0002" in re.findall(r">([^<]+)</text>", plot.svg)


def test_a_label_is_never_read_as_a_formula() -> None:
    assert "$\\frac{1}$" in draw("Title", [Series("a", STEPS, STEPS)], x=Axis("$\\frac{1}$"), y=Axis()).svg


def test_the_same_drawing_twice_and_no_settings_left_behind() -> None:
    before = dict(matplotlib.rcParams)
    first, second = (draw("Title", [Series("a", STEPS, np.sin(STEPS))], x=Axis(), y=Axis()).svg for _ in range(2))
    assert first == second
    assert dict(matplotlib.rcParams) == before
