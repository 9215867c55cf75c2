"""The mark `few` loses no value of a parameter: cells that run always have each of them, and they are few."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from tests.conftest import every_value


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
