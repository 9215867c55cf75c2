"""Ranks of predictions follow from the table alone, for every kind of label."""

from __future__ import annotations

import io

import numpy as np
import pandas as pd
import pytest

from workbench.data.labelled import labels
from workbench.data.labelled.labels import Kind, Label
from workbench.evaluation.prediction_table import class_names, ranked, suspect_table

CELLS: dict[Kind, list[Label]] = {
    "one": ["a", "b", "c"],
    "several": [("a",), ("a", "b"), (), ("c",)],
    "number": [0.5, 2.0, -1.0],
}


def table(kind: Kind, rows: int, seed: int = 0) -> pd.DataFrame:
    """Predictions of a random model, as `row_outputs.table` makes them."""
    draw = np.random.default_rng(seed)
    found = [CELLS[kind][number] for number in draw.integers(0, len(CELLS[kind]), rows)]
    meaning = labels.fit(kind, [*CELLS[kind], *found], source="rows")
    values_NC = meaning.values(draw.normal(size=(rows, len(meaning.names))))
    said = meaning.predicted(values_NC)
    columns: dict[str, object] = {
        "row": [f"rows, row {number}" for number in range(rows)],
        "image": [f"{number}.png" for number in range(rows)],
        "label": [list(each) if isinstance(each, tuple) else each for each in found],
        "predicted": [list(each) if isinstance(each, tuple) else each for each in said],
    }
    if kind != "number":
        columns |= {f"p_{name}": values_NC[:, number] for number, name in enumerate(meaning.names)}
    return pd.DataFrame(columns)


@pytest.mark.parametrize("kind", sorted(CELLS))
def test_mistakes_are_the_wrong_rows_the_surest_first(kind: Kind) -> None:
    found = table(kind, 60)
    ranking = ranked(found)
    assert sorted([*ranking.right, *ranking.mistakes]) == list(range(60))
    closest = np.diff(ranking.sure_N[ranking.right])
    assert (closest >= 0).all() if kind != "one" else (closest <= 0).all()
    assert ranking.mistakes and (np.diff(ranking.sure_N[ranking.mistakes]) <= 0).all()
    if kind == "number":
        off_N = (found["predicted"] - found["label"]).abs()
        assert ranking.mistakes[0] == off_N.argmax() and not ranking.uncertain
        return
    cells = zip(found["label"], found["predicted"], strict=True)
    wrong = {row for row, (label, said) in enumerate(cells) if set(label) != set(said)}
    assert set(ranking.mistakes) == wrong


def test_doubt_is_one_where_two_classes_tie_and_nothing_where_one_is_certain() -> None:
    found = pd.DataFrame({"label": list("aaa"), "predicted": list("aab"), "p_a": [1.0, 0.5, 0.4], "p_b": [0, 0.5, 0.6]})
    ranking = ranked(found)
    np.testing.assert_allclose(ranking.doubt_N, [0, 1, 0.8])
    assert ranking.uncertain == [1, 2] and ranking.mistakes == [2]


@pytest.mark.parametrize("kind", sorted(CELLS))
def test_a_table_that_was_written_and_read_ranks_alike(kind: Kind) -> None:
    found, buffer = table(kind, 40), io.BytesIO()
    found.to_parquet(buffer)
    one, two = ranked(found), ranked(pd.read_parquet(buffer))
    for name in ("right_N", "sure_N", "doubt_N"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
    assert class_names(found) == ([] if kind == "number" else ["a", "b", "c"])


def test_a_table_without_suspects_has_the_columns_of_one_with_some() -> None:
    found = table("one", 60)
    sure = found.assign(**{f"p_{name}": (found["label"] == name).astype(float) for name in "abc"})
    some, none = suspect_table(found), suspect_table(sure)
    assert len(some) > 0 == len(none) and some.dtypes.equals(none.dtypes)
