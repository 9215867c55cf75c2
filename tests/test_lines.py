"""Lines of tests: few cells have every value of each parameter, and who wants to be alone is alone."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import every_value, in_turn


@pytest.mark.parametrize("sizes", [(4,), (3, 3), (2, 5), (4, 3, 2)])
def test_each_value_of_each_parameter_is_kept(sizes: tuple[int, ...]) -> None:
    products = itertools.product(*map(range, sizes))
    cells = [Cell(dict(zip("abc", values, strict=False))) for values in products]
    kept = every_value(cells)
    for name, size in zip("abc", sizes, strict=False):
        assert {cell.callspec.params[name] for cell in kept} == set(range(size))
    assert len(kept) == max(sizes)


def test_parameters_that_come_together_are_met_together() -> None:
    pairs = [Cell({"name": name, "depth": depth}) for name in "abcd" for depth in (1, 3)]
    assert [(cell.callspec.params["name"], cell.callspec.params["depth"]) for cell in every_value(pairs)] == [
        *(("a", 1), ("b", 3), ("c", 1), ("d", 3))
    ]


class Cell:
    """A test with parameters, as pytest collects it."""

    def __init__(self, params: dict[str, object]) -> None:
        self.callspec = SimpleNamespace(params=params)


def test_one_is_alone_and_lets_nobody_in_while_it_waits(tmp_path: Path) -> None:
    seen, leave, left = list[str](), threading.Event(), threading.Event()

    def first() -> None:
        with in_turn(tmp_path / "room", alone=False), in_turn(tmp_path / "room", alone=False):  # many share it
            seen.append("first")
            leave.wait(10)
            seen.append("first leaves")
        left.set()

    def other(name: str, *, alone: bool) -> threading.Thread:
        def come() -> None:
            with in_turn(tmp_path / "room", alone=alone):
                seen.append(name)

        found = threading.Thread(target=come)
        found.start()
        found.join(0.3)
        assert found.is_alive(), "it waits"
        return found

    threading.Thread(target=first).start()
    while not seen:
        pass
    waiting = [other("alone", alone=True), other("later", alone=False)]
    leave.set()
    for each in waiting:
        each.join(10)
    assert left.wait(10) and seen == ["first", "first leaves", "alone", "later"]
