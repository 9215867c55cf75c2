"""Numbers as people read them."""

from __future__ import annotations

import math

import pytest

from workbench.runs import units


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (812, "812"), (999.4, "999"), (1000, "1.0 k"), (1_234_567, "1.2 M"), (7e9, "7.0 B"), (None, "-")],
)
def test_count(value: float | None, text: str) -> None:
    assert units.count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(12, "12 bytes"), (64_000, "64.0 kB"), (999_999, "1.0 MB"), (4_130_000_000, "4.1 GB"), (math.nan, "-")],
)
def test_size(value: float, text: str) -> None:
    assert units.size(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (4.23, "4.2 s"),
        (12, "12 s"),
        (59.7, "1 min"),
        (192, "3 min 12 s"),
        (3599.7, "1 h"),
        (18_130, "5 h 2 min"),
        (86_399, "1 d"),
        (183_600, "2 d 3 h"),
        (None, "-"),
    ],
)
def test_duration(seconds: float | None, text: str) -> None:
    assert units.duration(seconds) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.0042, "4.20 ms"), (0.413, "413 ms"), (4.2, "4.2 s")])
def test_a_step_never_takes_no_time(seconds: float, text: str) -> None:
    assert units.step(seconds) == text


@pytest.mark.parametrize(
    ("share", "text"), [(0, "0 %"), (0.834, "83 %"), (0.0241, "2.4 %"), (0.00031, "0.03 %"), (1, "100 %"), (None, "-")]
)
def test_percent(share: float | None, text: str) -> None:
    assert units.percent(share) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5570.4, "5,570"),
        (262.4, "262"),
        (3.921, "3.92"),
        (0.2143, "0.214"),
        (0.04, "0.040"),
        (2e-5, "2.0e-05"),
        (0, "0"),
        (-1.65, "-1.65"),
        (math.nan, "not a number"),
        (math.inf, "infinite"),
        (None, "-"),
    ],
)
def test_number(value: float | None, text: str) -> None:
    assert units.number(value) == text


@pytest.mark.parametrize(("value", "text"), [(0.16, "+0.160"), (-1.65, "-1.65"), (0.0, "0")])
def test_signed(value: float, text: str) -> None:
    assert units.signed(value) == text
