"""The difficulty of rows: numbers of their file, or of a user's function, each at its row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.run_files import write_lines
from workbench.config.sections.curriculum_config import CurriculumConfig
from workbench.data import difficulty
from workbench.data.rows import RawRow, read_rows
from workbench.errors import ConfigError, DataError


def rows(*values: Any) -> list[RawRow]:
    return [RawRow(f"rows.jsonl, row {number}", {"n": value}) for number, value in enumerate(values, start=1)]


def column(name: str = "n") -> CurriculumConfig:
    return CurriculumConfig(by="column", column=name)


def function(folder: Path, body: str, name: str) -> CurriculumConfig:
    path = folder / f"{name}.py"
    path.write_text(body)
    return CurriculumConfig(by="function", function=path)


def test_numbers_of_a_column_whatever_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,n\nx,3\ny,-0.5\n")
    write_lines(tmp_path / "b.jsonl", ({"text": "x", "n": each} for each in (3, -0.5)))
    for name in ("a.csv", "b.jsonl"):
        assert difficulty.of_rows(column(), read_rows(str(tmp_path / name))).tolist() == [3, -0.5]


@pytest.mark.parametrize("value", [None, "hard", True, float("nan"), float("inf"), [1]])
def test_a_row_without_a_number_has_no_place_in_an_order(value: Any) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl, row 2: `n` is to say how difficult"):
        difficulty.of_rows(column(), rows(1, value))


def test_a_column_that_is_not_there_is_guessed() -> None:
    with pytest.raises(DataError, match=r"row 1: data.curriculum.column: the row has no `nn`\. Did you mean `n`"):
        difficulty.of_rows(column("nn"), rows(1))


def test_a_function_judges_the_columns_of_each_row(tmp_path: Path) -> None:
    config = function(tmp_path, "def difficulty(row):\n    return row.pop('n') ** 2\n", "square")
    given = rows(3, -4)
    assert difficulty.of_rows(config, given).tolist() == [9, 16]
    assert given == rows(3, -4), "what it does to a row stays with it"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def hardness(row): return 1\n", "defines no function difficulty. Write `def difficulty"),
        ("def difficulty(row): return row['m']\n", r"called with rows.jsonl, row 1: .*line 1: KeyError"),
        ("def difficulty(row): return 'very'\n", "row 1, returned 'very'. Return a number"),
        ("import random\ndef difficulty(row): return random.random()\n", "called twice .* returned two numbers"),
    ],
)
def test_a_function_that_is_none_is_told_with_its_place(tmp_path: Path, body: str, message: str) -> None:
    name = f"wrong_{abs(hash(body))}"
    with pytest.raises(ConfigError, match=message):
        difficulty.of_rows(function(tmp_path, body, name), rows(1, 2))


def test_chance_orders_all_rows_and_the_seed_decides_it() -> None:
    found = [difficulty.by_chance(20, seed=seed) for seed in (0, 0, 1)]
    assert np.array_equal(found[0], found[1]) and not np.array_equal(found[0], found[2])
    assert len(set(found[0].tolist())) == 20
