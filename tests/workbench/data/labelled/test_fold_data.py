"""Rows, folds, test and unlabelled rows of a cross-validation: nothing known stands on two sides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import ValidationError

from tests.run_files import write_lines
from workbench.config import RunConfig
from workbench.data.labelled import fold_data
from workbench.data.labelled.fold_data import Features, FoldData
from workbench.data.labelled.records import RecordSource
from workbench.errors import DataError
from workbench.models import classifier

Rows = Sequence[dict[str, Any]]
Load = Callable[..., FoldData]
ANIMALS = ("cat", "dog")
NOUNS = ("garden", "river", "window", "castle", "market", "bottle", "candle", "forest", "ladder", "pocket")


def rows(count: int) -> list[dict[str, Any]]:
    """Sentences that are not alike."""
    chance = np.random.default_rng(0)
    return [
        {"text": f"{' '.join(chance.permutation(NOUNS)[:6])} {number * 7919}", "label": ANIMALS[number % 2]}
        for number in range(count)
    ]


@pytest.fixture
def load(tmp_path: Path, stories: str) -> Load:
    def loaded(
        train: Rows, *, test: Rows = (), more: Rows = (), features: Features | None = None, **sections: Any
    ) -> FoldData:
        data: dict[str, Any] = {"train": str(tmp_path / "train.jsonl")}
        for name, content in (("train", train), ("test", test), ("more", more)):
            write_lines(tmp_path / f"{name}.jsonl", content)
        data |= {"overlap": sections.pop("overlap", "auto")}
        if test:
            data["test"] = str(tmp_path / "test.jsonl")
        if more:
            sections["pseudo_label"] = {"unlabelled": str(tmp_path / "more.jsonl")}
        config = {"recipe": "crossval", "model": {"id": stories}, "data": data, "folds": {"k": 2}, **sections}
        parsed = RunConfig.model_validate(config)
        return fold_data.load(parsed, classifier.reader_of_backbone(parsed), features)

    return loaded


def copy(row: dict[str, Any], **other: Any) -> dict[str, Any]:
    """A near-duplicate."""
    return {**row, "text": row["text"].upper() + "!", **other}


def test_duplicates_share_a_fold_and_their_contradictions_are_named(load: Load) -> None:
    own = rows(20)
    found = load([*own, copy(own[3]), copy(own[4], label="dog")])
    fold_N = found.folds.fold_RN[0]
    assert len(found.rows) == 22 and fold_N[20] == fold_N[3] and fold_N[21] == fold_N[4]
    assert found.cluster_N[20] == found.cluster_N[3] != found.cluster_N[4]
    assert (
        found.duplicates is not None and found.duplicates.clusters == 2 and found.rows.supervised.tolist() == [1] * 22
    )
    assert [len(places) for places in found.conflicts] == [2] and "row 5" in found.conflicts[0][0]


def test_all_but_one_of_a_cluster_are_left_out_or_all_weigh_less(load: Load) -> None:
    own = rows(20)
    one = load([*own, copy(own[3])], duplicates={"on_duplicate": "keep_one"})
    assert len(one.rows) == len(one.cluster_N) == one.folds.fold_RN.shape[1] == 20 and len(one.rows.skipped) == 1
    less = load([*own, copy(own[3])], duplicates={"on_duplicate": "weight"})
    assert less.rows.supervised[[3, 20]].tolist() == [0.5, 0.5] and less.rows.supervised.sum() == 20
    ignored = load([*own, copy(own[3])], duplicates={"on_duplicate": "ignore"})
    assert ignored.duplicates is None and ignored.leak == 0 and len(ignored.rows) == 21


def test_no_cluster_stands_in_train_and_test(load: Load) -> None:
    own = rows(20)
    test = [copy(own[3]), {"text": "another thing altogether 12", "label": "cat"}]
    with pytest.raises(DataError, match=r"1 of 20 training rows are also in .*\n.*data\.overlap=drop"):
        load(own, test=test)
    told = load(own, test=test, overlap="tell")
    assert len(told.rows) == 20 and told.test is not None
    assert [(each.row, each.kind) for each in told.test.copies] == [(0, "other case or punctuation")]
    found = load(own, test=test, overlap="drop")
    assert len(found.rows) == 19 and found.test is not None and len(found.test) == 2
    assert found.cluster_T is not None and not set(found.cluster_T.tolist()) & set(found.cluster_N.tolist())
    assert "1 rows that are also in" in found.rows.skipped[0] and not found.test.copies


def test_unlabelled_rows_are_new(load: Load) -> None:
    own = rows(20)
    new = {"text": "something that nobody has asked before"}
    more = [{"text": copy(own[3])["text"]}, new, copy(new), {"text": "quite another question, number 9"}]
    found = load(own, more=more)
    assert found.unlabelled is not None and len(found.unlabelled) == 2 and not found.unlabelled.targets_NC.any()
    assert [record.fields[0] for record in found.unlabelled.records] == [new["text"], more[3]["text"]]
    with pytest.raises(DataError, match="every row is a near-duplicate"):
        load(own, more=more[:1])


def test_rows_with_like_features_share_a_cluster_with_near_duplicates(load: Load) -> None:
    """Row 0 is like row 1 by its features, and row 1 is a near-duplicate of row 20: all three are one."""
    own, rng = rows(20), np.random.default_rng(0)
    train, test = [*own, copy(own[1]), copy(own[4], label="dog")], rows(24)[20:]
    vectors = rng.normal(size=(30, 64)).astype(np.float32)
    vectors[0] = vectors[1] + 0.01
    vectors[5] = vectors[22] + 0.01  # a training row, and the first test row

    def features(sources: Sequence[RecordSource]) -> NDArray[np.float32]:
        return vectors[: sum(len(each.records) for each in sources)]

    plain = load(train, test=test, features=features)
    assert plain.cluster_N[0] != plain.cluster_N[1] == plain.cluster_N[20] and len(plain.rows) == 22
    asked = {"features": 0.9}
    found = load(train, test=test, features=features, duplicates=asked, overlap="drop")
    assert len(found.rows) == 21 and "1 rows that are near-duplicates of rows in" in found.rows.skipped[0]
    assert found.cluster_N[0] == found.cluster_N[1] == found.cluster_N[19]
    assert len({found.folds.fold_RN[0][row] for row in (0, 1, 19)}) == 1
    with pytest.raises(DataError, match=r"1 of like features.*\n.*data\.overlap=drop"):
        load(train, test=test, features=features, duplicates=asked, overlap="refuse")
    with pytest.raises(ValidationError, match="looks for none"):
        load(train, features=features, duplicates={"features": 0.9, "on_duplicate": "ignore"})


def test_rows_of_contradictions_that_are_left_out_can_still_be_shown(load: Load) -> None:
    own = [*rows(20), *(copy(each, label="cat") for each in rows(4))]  # rows 1 and 3 are dogs
    kept = load(own)
    assert kept.disputed is None and len(kept.conflicts) == 2
    found = load(own, duplicates={"on_duplicate": "keep_one"})
    assert found.conflicts == kept.conflicts and len(found.rows) == 20 and found.disputed is not None
    shown = {record.place for record in (*found.rows.records, *found.disputed.records)}
    assert {place for places in found.conflicts for place in places} <= shown
    assert len(found.disputed.records) == 2 and not {r.place for r in found.disputed.records} & {
        record.place for record in found.rows.records
    }
