from __future__ import annotations

from collections import Counter

import pytest

from workbench.evaluation.timely import in_time


class Clock:
    """Ten seconds, of which each part takes one."""

    def __init__(self) -> None:
        self.left_s = 10.0

    def left(self) -> float:
        return self.left_s


def test_all_in_their_order_where_nothing_limits_them() -> None:
    assert list(in_time(range(100), None)) == list(range(100))


def test_as_many_as_there_is_time_for() -> None:
    clock, done = Clock(), []
    for part in in_time(range(100), clock.left):
        done.append(part)
        clock.left_s -= 1.0
    assert len(done) == 10
    assert len(set(done)) == 10


def test_at_least_one() -> None:
    clock = Clock()
    clock.left_s = -5.0
    done = []
    for part in in_time(range(3), clock.left):
        done.append(part)
        clock.left_s -= 1.0
    assert len(done) == 1


def test_none_that_would_not_fit() -> None:
    clock, done = Clock(), 0
    for _ in in_time(range(100), clock.left):
        clock.left_s -= 3.0
        done += 1
    assert (done, clock.left_s) == (3, 1.0)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_those_that_are_done_are_from_everywhere(share: float) -> None:
    clock, thirds = Clock(), Counter[int]()
    for part in in_time(range(3000), clock.left):
        thirds[part // 1000] += 1
        clock.left_s -= 10.0 / (3000 * share)
    assert set(thirds) == {0, 1, 2}
    assert min(thirds.values()) > 0.8 * max(thirds.values())
