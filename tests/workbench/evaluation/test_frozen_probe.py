"""Neighbours are the nearest training rows that may be compared, and as many rows are looked at as cost little."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.conftest import STORIES
from workbench.config import RunConfig
from workbench.data.labelled.labelled_data import LabelledSet, load
from workbench.data.labelled.records import RowReader
from workbench.evaluation import frozen_probe
from workbench.evaluation.frozen_features import frozen_features
from workbench.models import classifier, row_readers


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))


def config(**evaluate: object) -> RunConfig:
    values = {
        "recipe": "classify",
        "model": {"id": str(STORIES), "weights": "float32"},
        "data": {"train": "starter/banking77_train.csv", "held_out": "starter/banking77_held_out.csv"},
        "evaluate": evaluate,
    }
    return RunConfig.model_validate(values)


@pytest.fixture(scope="module")
def rows() -> tuple[RowReader, LabelledSet, LabelledSet]:
    reader = row_readers.of_backbone(config())
    data = load(config(), reader)
    return reader, data.train.subset(np.arange(0, 1600, 20)), data.held_out.subset(np.arange(0, 400, 10))


def brute_force(train_ND: np.ndarray, other_D: np.ndarray, allowed_N: np.ndarray) -> list[int]:
    centred_ND, centred_D = train_ND - train_ND.mean(0), other_D - train_ND.mean(0)
    cosine = centred_ND @ centred_D / np.linalg.norm(centred_ND, axis=1) / np.linalg.norm(centred_D)
    order = np.argsort(-np.where(allowed_N, cosine, -2), kind="stable")
    return [int(row) for row in order[: frozen_probe.NEIGHBOURS] if allowed_N[row]]


def test_neighbours_are_the_nearest_training_rows(rows: tuple[RowReader, LabelledSet, LabelledSet]) -> None:
    reader, train, held_out = rows
    found = frozen_probe.of_splits(config(), reader, train, held_out, most=4000)
    train_ND, held_out_ND = frozen_features(config().model, reader, [train.inputs, held_out.inputs])
    for row in (0, 7, 39):
        near = [nearest for _, nearest, _ in found.neighbours([row])]
        assert near == brute_force(train_ND, held_out_ND[row], np.ones(len(train), dtype=bool))
    facts = found.facts
    assert (facts["train"], facts["others"], facts["compared"], facts["rows"]) == (80, 40, 80, 80)
    assert 0 < facts["linear"] <= 1 and "linear probe 0." in frozen_probe.sentence(facts, after=0.9)


def test_rows_of_a_fold_are_compared_with_those_of_others(rows: tuple[RowReader, LabelledSet, LabelledSet]) -> None:
    reader, train, _ = rows
    fold_N = np.arange(80) % 4
    found = frozen_probe.of_folds(config(), reader, train, fold_N, most=4000)
    (train_ND,) = frozen_features(config().model, reader, [train.inputs])
    for row in (0, 1, 79):
        near = [nearest for _, nearest, _ in found.neighbours([row])]
        assert near == brute_force(train_ND, train_ND[row], fold_N != fold_N[row])
    assert (found.facts["train"], found.facts["others"]) == (60, 20)


def test_a_mistake_that_was_not_looked_at_has_neighbours_too(
    rows: tuple[RowReader, LabelledSet, LabelledSet], tmp_path: Path
) -> None:
    reader, train, held_out = rows
    found = frozen_probe.of_splits(config(), reader, train, held_out, most=30)
    assert len(found.train_T) == len(found.others_M) == 15
    names = sorted({str(label) for label in (*train.labels, *held_out.labels)})
    p_NC = np.random.default_rng(0).dirichlet(np.ones(len(names)), len(held_out))
    said = [names[number] for number in p_NC.argmax(1)]
    places = [record.place for record in held_out.records]
    table = pd.DataFrame({"row": places, "text": places, "label": held_out.labels, "predicted": said})
    table = pd.concat([table, pd.DataFrame(p_NC, columns=[f"p_{name}" for name in names])], axis=1)
    near = found.write_neighbours(tmp_path, table)
    written = pd.read_parquet(tmp_path / frozen_probe.NEIGHBOURS_FILE)
    assert set(written["row"]) <= set(places) and written["row"].nunique() == frozen_probe.EXPLAINED
    assert set(written["neighbour"]) == {record.place for record in near.records}
    assert {train.place(row) for row in found.train_T} >= set(written["neighbour"])
    assert written.groupby("row")["similarity"].apply(lambda each: each.is_monotonic_decreasing).all()


def test_as_many_rows_are_looked_at_as_cost_little(rows: tuple[RowReader, LabelledSet, LabelledSet]) -> None:
    task = classifier.task(classifier.Labels("one", ("a", "b")), seed=0)

    def count(visits: int | None, **evaluate: object) -> int:
        return frozen_probe.rows_before_run(config(**evaluate), task, visits=visits)

    assert count(100) == count(None) == count(10**5, probe=0) == 0
    assert count(10_000) == 10_000 * frozen_probe.SHARE and count(10**8) == frozen_probe.MOST
    assert count(None, probe=7) == 7
    assert frozen_probe.rows_in_check(config(), task, rows[1].lengths) == frozen_probe.MOST
    assert frozen_probe.rows_in_check(config(), task, rows[1].lengths * 10**6) == 0


@pytest.mark.parametrize("most", [1, 2, 5])
def test_few_rows_and_labels_without_classes_have_neighbours_at_least(
    rows: tuple[RowReader, LabelledSet, LabelledSet], most: int
) -> None:
    reader, train, held_out = rows
    few = frozen_probe.of_splits(config(), reader, train, held_out, most=most)
    assert few.facts["train"] >= 1 and len(few.neighbours([3])) == min(3, len(few.train_T))
    fold = frozen_probe.of_folds(config(), reader, train, np.arange(80) // 40, most=most)
    assert {fold.fold_N[near] for _, near, _ in fold.neighbours([0])} <= {1} and "compared" in fold.facts
    numbers = replace(train, records=tuple(each._replace(label=1.5) for each in train.records))
    found = frozen_probe.of_splits(config(), reader, numbers, held_out, most=60)
    assert found.scores() is None and frozen_probe.sentence(found.facts) == "" and len(found.neighbours([0, 1])) == 6


def test_all_rows_are_looked_at_where_their_features_are_known(
    rows: tuple[RowReader, LabelledSet, LabelledSet],
) -> None:
    reader, train, held_out = rows
    assert len(frozen_probe.of_splits(config(), reader, train, held_out, most=20).train_T) == 10
    frozen_features(config().model, reader, [train.inputs, held_out.inputs])
    found = frozen_probe.of_splits(config(), reader, train, held_out, most=20)
    assert (len(found.train_T), len(found.others_M)) == (80, 40)
