from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from workbench.runs.pace import Pace


def trained(pace: Pace, *, until: float, a_step: Callable[[float], float], now: float = 0.0) -> float:
    """Steps of 100 tokens until a moment; returns when the last ended."""
    while now < until:
        seconds = a_step(now)
        now += seconds
        pace.stepped(now, seconds=seconds, tokens=100)
    return now


def test_nothing_is_known_before_the_first_step() -> None:
    pace = Pace()
    assert pace.usual is pace.longest is pace.per_token(0.0) is pace.lately(0.0, 9.0) is None
    assert pace.slowness(0.0, steady=True) is None


def test_a_moment_is_told_by_the_steps_around_it() -> None:
    pace = Pace()
    trained(pace, until=60.0, a_step=lambda now: 1.0 if now < 30 else 2.0)
    assert pace.per_token(-50.0) == pytest.approx(0.01)
    assert pace.per_token(10.0) == pytest.approx(0.01)
    assert pace.per_token(50.0) == pytest.approx(0.02)
    assert pace.per_token(500.0) == pytest.approx(0.02)
    assert (pace.usual, pace.longest) == (2.0, 2.0)


def test_one_slow_step_does_not_tell_a_moment_but_counts_lately() -> None:
    pace = Pace()
    now = trained(pace, until=20.0, a_step=lambda now: 10.0 if now == 5.0 else 1.0)
    assert pace.per_token(10.0) == pytest.approx(0.01)
    assert pace.usual == 1.0
    assert pace.lately(now, 20.0) == pytest.approx(20.0 / (100 * 11))


def test_lately_is_all_seconds_over_all_tokens() -> None:
    pace = Pace()
    now = trained(pace, until=40.0, a_step=lambda now: 1.0 if now < 20 else 2.0)
    assert pace.lately(now, 10.0) == pytest.approx(0.02)
    assert pace.lately(now, 1000.0) == pytest.approx(40.0 / (100 * 30))


def test_where_steps_become_other_work_evaluations_tell() -> None:
    pace = Pace()
    # Blocks freeze at 40 s, after which a step takes half; the machine stays as it is.
    now = trained(pace, until=30.0, a_step=lambda now: 1.0)
    pace.evaluated(now, seconds=4.0)
    now = trained(pace, until=60.0, a_step=lambda now: 1.0 if now < 40 else 0.5, now=now)
    pace.evaluated(now, seconds=4.0)
    now = trained(pace, until=90.0, a_step=lambda now: 0.5, now=now)
    by_steps = [pace.slowness(at, steady=True) for at in (10.0, 90.0)]
    by_both = [pace.slowness(at, steady=False) for at in (10.0, 90.0)]
    assert by_steps[0] == pytest.approx(2 * (by_steps[1] or 0))
    assert by_both[0] == pytest.approx(by_both[1])


def test_what_a_later_process_must_know() -> None:
    first = Pace()
    trained(first, until=30.0, a_step=lambda now: 1.5)
    for at in (3.0, 9.0, 27.0):
        first.evaluated(at, seconds=at)
    second = Pace(json.loads(json.dumps(first.state())))
    assert (second.usual, second.longest) == (1.5, 1.5)
    assert second.per_token(30.0) is None
    assert [found[:2] for found in second.state()["evaluations"]] == [(3.0, 3.0), (27.0, 27.0)]
    trained(second, until=60.0, a_step=lambda now: 3.0, now=40.0)
    assert second.usual == 3.0
