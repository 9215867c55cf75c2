"""The rows of each step, and the difficulty by which a curriculum opens them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.run_files import write_lines
from workbench.config import RunConfig
from workbench.config.sections.curriculum_config import CurriculumConfig
from workbench.data import row_order
from workbench.data.batching import Indices, MicroBatch, global_batch
from workbench.data.row_order import RowOrder, paced
from workbench.data.rows import RawRow, read_rows
from workbench.errors import ConfigError, DataError


@dataclass(frozen=True)
class Lengths:
    """Examples of which only the lengths are known."""

    lengths: Indices
    difficulty: Any = None

    @property
    def supervised(self) -> Indices:
        return self.lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def sample(self, draws: Indices, *, epoch: int) -> Indices:
        return draws

    def place(self, index: int) -> str:
        return f"row {index}"

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        raise NotImplementedError


def order(
    lengths: Indices, steps: int, *, size: int = 4, seed: int = 0, difficulty: Any = None, **curriculum: Any
) -> RowOrder:
    config = RunConfig.model_validate(
        {
            "recipe": "sft",
            "seed": seed,
            "data": {"train": "rows.jsonl", "curriculum": curriculum},
            "batch": {"size": size},
            "train": {"steps": steps},
        }
    )
    return RowOrder(Lengths(lengths, difficulty), config, steps)


@given(
    count=st.integers(2, 40),
    size=st.integers(1, 9),
    passes=st.floats(0.3, 4),
    start=st.floats(0.01, 0.99),
    until=st.floats(0.01, 1),
    pace=st.sampled_from(["linear", "root", "step"]),
    seed=st.integers(0, 5),
)
def test_every_row_comes_as_often_as_without_an_order_and_never_before_it_must(
    count: int, size: int, passes: float, start: float, until: float, pace: Any, seed: int
) -> None:
    share = CurriculumConfig(by="length", pace=pace, start=start, until=until).open_share
    sizes = [size] * max(1, round(passes * count / size))
    rows_N = np.random.default_rng(seed).permutation(count)
    found = list(paced(rows_N, sizes, share, seed=seed))
    steps = [step.rows for step in found]
    assert [len(rows) for rows in steps] == sizes
    times = np.bincount(np.concatenate(steps), minlength=count)
    whole, rest = divmod(sum(sizes), count)
    assert sorted(times) == [whole] * (count - rest) + [whole + 1] * rest, "fairness over the whole run"
    position = np.argsort(rows_N)
    drawn = 0
    assert all(before.opened <= after.opened for before, after in itertools.pairwise(found))
    for rows, opened in found:
        asked = round(share(drawn / sum(sizes)) * count)
        # Beyond the share that is asked for, only as many rows are open as have to be, for the draws to be enough.
        enough = next(n for n in range(count + 1) if times[rows_N[:n]].sum() >= drawn + len(rows))
        assert position[rows].max() < opened <= max(asked, enough, 1)
        drawn += len(rows)


def test_open_rows_are_drawn_evenly() -> None:
    """Each set of two from the first three of four open rows comes equally often as the first step."""
    firsts = [frozenset(next(paced(np.arange(4), [2, 2], lambda _: 0.75, seed=s)).rows.tolist()) for s in range(3000)]
    counts = [firsts.count(frozenset(pair)) for pair in itertools.combinations(range(3), 2)]
    assert sum(counts) == 3000 and np.ptp(counts) < 4 * (3000 / 3) ** 0.5


def test_all_open_is_a_shuffle_and_the_seed_decides_it() -> None:
    found = [
        np.concatenate([step.rows for step in paced(np.arange(50), [8] * 6 + [2], lambda _: 1.0, seed=seed)]).tolist()
        for seed in (0, 0, 1)
    ]
    assert found[0] == found[1] != found[2]
    assert sorted(found[0]) == list(range(50)) != found[0]


def test_paces_are_those_of_the_paper() -> None:
    """Platanios et al. 2019, equations 3 and 8: c(t) = min(1, t (1 - c0) / T + c0) and its square root."""
    for t in np.linspace(0, 1, 41):
        c0, until = 0.1, 0.6
        linear = CurriculumConfig(by="length", pace="linear", start=c0, until=until).open_share(t)
        root = CurriculumConfig(by="length", pace="root", start=c0, until=until).open_share(t)
        assert linear == pytest.approx(min(1, t / until * (1 - c0) + c0))
        assert root == pytest.approx(min(1, np.sqrt(t / until * (1 - c0**2) + c0**2)))
    steps = CurriculumConfig(by="length", pace="step", start=0.2, until=1.0, stages=4).open_share
    assert [round(steps(t), 6) for t in (0, 0.24, 0.25, 0.5, 0.75, 0.99, 1)] == [0.2, 0.2, 0.4, 0.6, 0.8, 0.8, 1]


@pytest.mark.parametrize("first", ["easy", "hard"])
def test_a_run_begins_with_the_short_rows_or_with_the_long_ones(first: str) -> None:
    lengths = np.random.default_rng(1).permutation(40) + 1
    found = order(lengths, 20, by="length", first=first, start=0.25, until=0.9, pace="linear")
    opened = lengths[np.concatenate([found.rows(step) for step in range(3)])]
    assert (opened <= 14).all() if first == "easy" else (opened >= 27).all()
    last = lengths[np.concatenate([found.rows(step) for step in range(14, 20)])]
    assert last.mean() > lengths.mean() + 3 if first == "easy" else last.mean() < lengths.mean() - 3


def test_steps_are_as_large_as_without_a_curriculum_and_do_not_depend_on_what_was_asked_before() -> None:
    lengths = np.arange(1, 15)
    plain, found, again = (order(lengths, 9, **words) for words in ({}, {"by": "length"}, {"by": "length"}))
    assert [len(plain.rows(step)) for step in range(9)] == [len(found.rows(step)) for step in range(9)]
    assert np.array_equal(again.rows(7), found.rows(7))
    assert len(found.rows(9)), "a trainer reads one step ahead"
    assert [found.epoch(step) for step in range(9)] == [0, 0, 0, 0, 1, 1, 1, 1, 2]


def test_the_share_of_open_rows_is_told_and_holds_every_row_that_was_drawn() -> None:
    found = order(np.arange(1, 41), 20, by="length", start=0.25, until=0.8, pace="linear")
    shares = [found.metrics(step)["open_share"] for step in range(20)]
    assert shares[0] == 0.25 and shares == sorted(shares) and shares[-1] == 1
    assert all(found.rows(step).max() < round(share * 40) for step, share in enumerate(shares))
    assert not order(np.arange(1, 15), 9).metrics(0), "no curriculum opens anything"


def test_without_a_curriculum_it_is_the_seeded_permutation() -> None:
    found = order(np.arange(1, 15), 9, seed=3)
    for step in range(9):
        assert np.array_equal(found.rows(step), global_batch(step, rows=14, size=4, seed=3))


@pytest.mark.parametrize(
    "by", [{"by": "perplexity"}, {"by": "column", "column": "n"}, {"by": "function", "function": "f"}]
)
def test_another_difficulty_takes_the_place_of_the_length(by: dict[str, str]) -> None:
    """The same order as by length, for rows whose difficulty is what the length was."""
    hard = np.random.default_rng(2).permutation(30) + 1
    for first in ("easy", "hard"):
        wanted = order(hard, 12, by="length", first=first)
        found = order(np.ones(30, dtype=np.int64), 12, difficulty=hard / 7, first=first, **by)
        assert all(np.array_equal(found.rows(step), wanted.rows(step)) for step in range(12))


def test_what_the_run_measures_orders_nothing_beforehand() -> None:
    found = order(np.full(14, 5), 9, by="self_paced", seed=3)
    assert all(np.array_equal(found.rows(step), global_batch(step, rows=14, size=4, seed=3)) for step in range(9))


def test_rows_of_one_length_have_no_order() -> None:
    with pytest.raises(
        DataError, match=r"all 7 training rows have the same number of tokens \(5\)[^\n]*\n  Leave data.curriculum out"
    ):
        order(np.full(7, 5), 3, by="length")


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
        assert row_order.row_difficulty(column(), read_rows(str(tmp_path / name))).tolist() == [3, -0.5]


@pytest.mark.parametrize("value", [None, "hard", True, float("nan"), float("inf"), [1]])
def test_a_row_without_a_number_has_no_place_in_an_order(value: Any) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl, row 2: `n` is to say how difficult"):
        row_order.row_difficulty(column(), rows(1, value))


def test_a_column_that_is_not_there_is_guessed() -> None:
    with pytest.raises(DataError, match=r"row 1: data.curriculum.column: the row has no `nn`\. Did you mean `n`"):
        row_order.row_difficulty(column("nn"), rows(1))


def test_a_function_judges_the_columns_of_each_row(tmp_path: Path) -> None:
    config = function(tmp_path, "def difficulty(row):\n    return row.pop('n') ** 2\n", "square")
    given = rows(3, -4)
    assert row_order.row_difficulty(config, given).tolist() == [9, 16]
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
        row_order.row_difficulty(function(tmp_path, body, name), rows(1, 2))


def test_chance_orders_all_rows_and_the_seed_decides_it() -> None:
    found = [row_order.random_difficulty(20, seed=seed) for seed in (0, 0, 1)]
    assert np.array_equal(found[0], found[1]) and not np.array_equal(found[0], found[2])
    assert len(set(found[0].tolist())) == 20
