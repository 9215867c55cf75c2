"""Ranks of predictions follow from the table alone, for every kind of label."""

from __future__ import annotations

import io

import numpy as np
import pandas as pd
import pytest
from scipy import special

from workbench.data.labelled import labels
from workbench.data.labelled.labels import Kind, Label
from workbench.evaluation.prediction_table import class_names, label_quality, ranked, suspect_table, suspected

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


def told(
    rows: int, classes: int, *, noise: float, seed: int = 0, sure: float = 2.5
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    """Probabilities of a fair model, labels of which a share is wrong, and which ones are."""
    rng = np.random.default_rng(seed)
    true = rng.integers(classes, size=rows)
    p = special.softmax(sure * np.eye(classes)[true] + rng.normal(size=(rows, classes)), axis=1)
    wrong = rng.random(rows) < noise
    label = np.where(wrong, (true + rng.integers(1, classes, size=rows)) % classes, true)
    return p, label, wrong


def test_planted_wrong_labels_are_found() -> None:
    p, label, wrong = told(2000, 5, noise=0.1)
    found = np.asarray(list(suspected(p, label)))
    assert wrong[found].mean() > 0.8, "eight times as many as by chance"
    assert wrong[found].sum() > 0.6 * wrong.sum()
    assert wrong[found[:50]].mean() > 0.95, "the most suspect first"


def test_quality_is_the_probability_that_a_label_is_right() -> None:
    """Of a model that is fair of the true classes, for any temperature that it is told at."""
    p, label, wrong = told(20000, 4, noise=0.2, seed=1)
    quality = label_quality(p, label)
    for low in np.arange(0, 1, 0.2):
        mine = (quality >= low) & (quality < low + 0.2)
        assert abs(quality[mine].mean() - (~wrong[mine]).mean()) < 0.05
    cold = special.softmax(np.log(p) * 0.3, axis=1)
    np.testing.assert_allclose(label_quality(cold, label), quality, atol=0.02)


def test_suspects_are_in_the_order_of_their_quality_and_of_another_class() -> None:
    p, label, _ = told(300, 4, noise=0.15, seed=3)
    quality, found = label_quality(p, label), suspected(p, label)
    assert list(quality[list(found)]) == sorted(quality[list(found)])
    assert all(p[row].argmax() == other != label[row] and quality[row] < 0.5 for row, other in found.items())


@pytest.mark.parametrize(("classes", "noise"), [(4, 0.1), (12, 0.2)])
def test_the_mistakes_of_a_model_are_taken_for_wrong_labels_less_than_by_cleanlab(classes: int, noise: float) -> None:
    """As many planted ones among those that are named, and more of what is named is planted."""
    from cleanlab import filter as cleanlab

    p, label, wrong = told(3000, classes, noise=noise, seed=classes, sure=1.2)
    theirs = cleanlab.find_label_issues(label, p, filter_by="confident_learning", n_jobs=1)
    ours = np.zeros(len(label), dtype=bool)
    ours[list(suspected(p, label))] = True
    assert ours.sum() > 50 and wrong[ours].mean() > wrong[theirs].mean() + 0.05


def test_right_labels_are_not_suspected() -> None:
    p, label, _ = told(500, 3, noise=0)
    sure = np.eye(3)[label]
    assert suspected(sure, label) == {} and len(suspected(p, label)) < 0.1 * len(label)


def test_a_class_without_rows_is_nobody_s() -> None:
    assert suspected(np.eye(3)[[1, 1]], np.asarray([0, 2])) == {}
