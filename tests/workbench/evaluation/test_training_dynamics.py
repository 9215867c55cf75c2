"""The map of the data, written out row by row."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from workbench.evaluation import training_dynamics
from workbench.training.row_losses import Visits


class Places:
    """Rows that only have a place."""

    def place(self, index: int) -> str:
        return f"rows:{index + 1}"


@pytest.fixture
def visits() -> Visits:
    """Random visits of 20 rows, some of them never."""
    rng = np.random.default_rng(0)
    step = np.repeat(np.arange(1, 31, dtype=np.int32), 4)
    row = np.concatenate([rng.choice(18, size=4, replace=False) for _ in range(30)]).astype(np.int32)
    p = rng.uniform(0.05, 1, size=120).astype(np.float32)
    return Visits(step, row, -np.log(p), p, rng.choice([0.0, 0.5, 1.0], size=120).astype(np.float32))


def test_each_row_by_its_definition(visits: Visits) -> None:
    found = training_dynamics.table(visits).set_index("number")
    assert found.index.tolist() == sorted(set(visits.row.tolist()))
    for number, line in found.iterrows():
        at = np.flatnonzero(visits.row == number)
        p, right = visits.probability[at].astype(np.float64), visits.right[at]
        assert line["visits"] == len(at)
        np.testing.assert_allclose(line["losses"], visits.loss[at])
        assert (line["first_loss"], line["last_loss"]) == (visits.loss[at[0]], visits.loss[at[-1]])
        np.testing.assert_allclose(
            [line["confidence"], line["variability"], line["correctness"]], [p.mean(), p.std(), right.mean()]
        )
        assert line["forgotten"] == sum(a == 1 and b < 1 for a, b in pairwise(right))


def test_the_order_of_visits_within_a_step_does_not_matter(visits: Visits) -> None:
    order = np.lexsort((-visits.row, visits.step))
    pd.testing.assert_frame_equal(
        training_dynamics.table(visits), training_dynamics.table(Visits(*(each[order] for each in visits)))
    )


def test_no_visits_are_no_rows(tmp_path: Path) -> None:
    nothing = Visits(*(np.empty(0, kind) for kind in (np.int32, np.int32, np.float32, np.float32, np.float32)))
    assert training_dynamics.table(nothing).empty


def test_several_adapters_are_one_table(visits: Visits, tmp_path: Path) -> None:
    places: Any = Places()
    half = visits.row < 10
    said = pd.DataFrame({"row": [f"rows:{row}" for row in (1, 2, 1, 2)], "label": ["a", "b"] * 2})
    said = said.assign(predicted=["a", "a", "b", "a"], p_a=[0.9, 0.9, 0.1, 0.9], p_b=[0.1, 0.1, 0.9, 0.1])
    parts = [visits, Visits(*(each[half] for each in visits))]
    for number, part in enumerate(parts):
        (tmp_path / str(number)).mkdir()
        training_dynamics.write(tmp_path / str(number), part, places)
    training_dynamics.write_combined(tmp_path, [tmp_path / "0", tmp_path / "1", tmp_path / "unfinished"], said)
    one = pd.read_parquet(tmp_path / "0" / "dynamics.parquet").set_index("row")
    both = pd.read_parquet(tmp_path / "dynamics.parquet").set_index("row")
    assert set(both.index) == set(one.index) == {f"rows:{number + 1}" for number in set(visits.row.tolist())}
    for row, line in both.iterrows():
        times = 2 if int(str(row).split(":")[1]) <= 10 else 1
        assert line["adapters"] == times and line["visits"] == times * one.at[row, "visits"]
        assert line["confidence"] == pytest.approx(one.at[row, "confidence"])
        assert line["forgotten"] == times * one.at[row, "forgotten"]
    halves = [pd.read_parquet(tmp_path / str(number) / "dynamics.parquet").set_index("row") for number in (0, 1)]
    for row, losses in both["losses"].items():
        own = [half.at[row, "losses"] for half in halves if row in half.index]
        wanted = [np.mean([each[at] for each in own if len(each) > at]) for at in range(max(map(len, own)))]
        np.testing.assert_allclose(losses, wanted, rtol=1e-6)
    told = both["right_out_of_fold"].reindex(["rows:1", "rows:2", "rows:3"])
    assert told.fillna(-1).tolist() == [0.5, 0, -1], "of two repeats; the last row was asked in none"


def test_the_hardest_rows_are_told_in_words(visits: Visits, tmp_path: Path) -> None:
    places: Any = Places()
    training_dynamics.write(tmp_path, visits, places, lambda row: f"text {row + 1}")
    found = pd.read_parquet(tmp_path / "dynamics.parquet")
    told = found.dropna(subset=["text"])
    assert set(told["row"]) == set(training_dynamics.hardest(found)["row"]) and len(told) == training_dynamics.HARDEST
    assert [text.split()[1] for text in told["text"]] == [row.split(":")[1] for row in told["row"]]


def test_rows_that_nobody_learns() -> None:
    found = pd.DataFrame({"correctness": [0, 0, 0.5, 0], "visits": [3, 1, 3, 2], "confidence": [0.2, 0.1, 0.1, 0.1]})
    assert training_dynamics.never_learned(found).index.tolist() == [3, 0]
    assert training_dynamics.unlearnable(found).empty, "nobody was asked out of fold"
    assert training_dynamics.unlearnable(found.assign(right_out_of_fold=[0, 0, 0, 0.5])).index.tolist() == [0]
