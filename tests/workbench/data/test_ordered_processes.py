"""Results stand in the order of the items, and errors are those of the first item, for any number of processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from workbench.data import ordered_processes
from workbench.data.ordered_processes import available, results
from workbench.errors import ConfigError, DataError

pytestmark = pytest.mark.usefixtures("importable")
COUNTS = (1, 2, 4)


@pytest.fixture(autouse=True)
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes start after two items."""
    monkeypatch.setattr(ordered_processes, "OWN", 2)


def square(number: int, *, bad: tuple[int, ...] = ()) -> int:
    if number in bad:
        raise DataError(f"row {number}")
    return number * number


def process_of(number: int) -> int:
    sum(range(200_000))
    return os.getpid()


def dies_elsewhere(number: int, *, parent: int) -> int:
    if os.getpid() != parent:
        os._exit(1)
    return number


@pytest.mark.parametrize("processes", COUNTS)
def test_results_are_in_the_order_of_the_items(processes: int) -> None:
    assert list(results(square, range(100), processes=processes)) == [number**2 for number in range(100)]
    assert list(results(square, [], processes=processes)) == []


def test_work_is_shared_only_where_there_is_much() -> None:
    assert len(set(results(process_of, range(400), processes=2))) == 2
    assert set(results(process_of, range(2), processes=4)) == {os.getpid()}


@pytest.mark.parametrize("processes", COUNTS)
def test_the_first_error_is_raised_after_the_results_before_it(processes: int) -> None:
    def unreadable() -> Iterator[int]:
        yield from range(40)
        raise DataError("cannot be read")

    for bad, message in (((31, 7, 50), "row 7"), ((), "cannot be read")):
        found: list[int] = []
        with pytest.raises(DataError, match=message):
            found.extend(results(partial(square, bad=bad), unreadable(), processes=processes))
        assert found[:7] == [number**2 for number in range(7)]


def test_no_process_and_no_thread_outlives_an_iterator_that_is_left() -> None:
    threads = threading.active_count()
    left = results(square, range(10_000), processes=3)
    assert [next(left) for _ in range(5)] == [0, 1, 4, 9, 16]
    left.close()  # type: ignore[attr-defined]
    assert threading.active_count() == threads


def test_a_killed_process_is_told_with_its_cure() -> None:
    with pytest.raises(DataError, match="WORKBENCH_PROCESSES=1"):
        list(results(partial(dies_elsewhere, parent=os.getpid()), range(10_000), processes=2))


def test_the_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORKBENCH_PROCESSES", raising=False)
    assert available() == min(16, len(os.sched_getaffinity(0)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    assert available() == 1
    monkeypatch.setenv("WORKBENCH_PROCESSES", "3")
    assert available() == 3
    monkeypatch.setenv("WORKBENCH_PROCESSES", "0")
    with pytest.raises(ConfigError, match="WORKBENCH_PROCESSES=0: must be"):
        available()
