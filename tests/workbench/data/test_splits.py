"""Splits of any rows."""

from __future__ import annotations

from typing import Any, NamedTuple

from workbench.data.splits import Splits


class Rows(NamedTuple):
    count: int

    def facts(self) -> dict[str, Any]:
        return {"rows": self.count}


def test_without_test_rows_nothing_is_made_of_them() -> None:
    splits = Splits(Rows(9), Rows(0), None)
    assert splits.named() == {"train": Rows(9), "held_out": Rows(0)}, "empty rows are rows"
    assert splits.map(lambda rows: Rows(rows.count + 1)) == Splits(Rows(10), Rows(1), None)
    assert splits.facts() == {"train": {"rows": 9}, "held_out": {"rows": 0}, "test": None}


def test_test_rows_come_last() -> None:
    assert list(Splits(Rows(1), Rows(2), Rows(3)).named()) == ["train", "held_out", "test"]
