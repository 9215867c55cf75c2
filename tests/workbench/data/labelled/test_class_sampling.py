"""Draws of the classes: equally often, every row in its turn, and a function of (seed, epoch) alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.config import RunConfig
from workbench.data.batching import Weights
from workbench.data.labelled.class_sampling import ClassBalancedRows, balanced
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.data.labelled.record_table import EncodedTexts, FieldTokens, LabelledRecord
from workbench.data.labelled.text_reader import TokenRows
from workbench.data.rows import RawRow


def config(**classes: Any) -> RunConfig:
    return RunConfig.model_validate({"recipe": "classify", "data": {"train": "x"}, "classes": classes})


def labelled(classes: list[int], *, weights: Weights | None = None) -> LabelledSet:
    return LabelledSet(
        records=tuple(LabelledRecord(RawRow(f"row {n + 1}"), ("",), str(each)) for n, each in enumerate(classes)),
        inputs=TokenRows(EncodedTexts.of(FieldTokens(np.arange(3 + n % 4), False) for n in range(len(classes)))),
        targets_NC=np.eye(max(classes) + 1, dtype=np.float32)[classes],
        supervised=np.ones(len(classes)) if weights is None else weights,
        source="rows",
        fingerprint="",
    )


@settings(deadline=None)
@given(
    classes=st.lists(st.integers(0, 3), min_size=4, max_size=60),
    sampling=st.sampled_from(["even", "over", "under"]),
    seed=st.integers(0, 5),
    epochs=st.integers(1, 5),
)
def test_classes_are_drawn_equally_often_and_rows_in_turn(
    classes: list[int], sampling: str, seed: int, epochs: int
) -> None:
    rows = labelled(classes)
    found = ClassBalancedRows(rows, sampling, seed)  # type: ignore[arg-type]
    sizes = Counter(classes)
    each = {"even": round(len(rows) / len(sizes)), "over": max(sizes.values()), "under": min(sizes.values())}[sampling]
    assert len(found) == each * len(sizes)
    drawn: Counter[int] = Counter()
    for epoch in range(epochs):
        taken = found.sample(np.arange(len(found)), epoch=epoch)
        assert Counter(classes[row] for row in taken) == dict.fromkeys(sizes, each)
        drawn.update(taken.tolist())
    for number in sizes:
        counts = [drawn[row] for row, own in enumerate(classes) if own == number]
        assert max(counts) - min(counts) <= 1


def test_draws_depend_on_seed_and_epoch_alone() -> None:
    rows = labelled([0] * 40 + [1] * 7)
    first, again, other = (
        ClassBalancedRows(rows, "under", 0),
        ClassBalancedRows(rows, "under", 0),
        ClassBalancedRows(rows, "under", 1),
    )
    some = np.asarray([13, 0, 5, 9])
    for epoch in (3, 0, 7):
        everything = first.sample(np.arange(14), epoch=epoch)
        assert np.array_equal(again.sample(some, epoch=epoch), everything[some])
    assert not np.array_equal(first.sample(np.arange(14), epoch=0), first.sample(np.arange(14), epoch=1))
    assert not np.array_equal(first.sample(np.arange(14), epoch=0), other.sample(np.arange(14), epoch=0))


def test_rows_keep_their_lengths_weights_and_places() -> None:
    weights = np.asarray([0.5, 2.0, 1.0, 0.25])
    found = ClassBalancedRows(labelled([0, 0, 0, 1], weights=weights), "over", 0)
    (row,) = set(found.sample(np.arange(len(found)), epoch=0)[3:].tolist())
    assert (row, found.place(row), found.supervised[row]) == (3, "row 4", 0.25)
    batch = found.batch(np.asarray([3, 1]))
    assert batch.labels_N[:, 0].tolist() == [0.25, 2.0] and batch.inputs["attention_mask"].sum(1).tolist() == [6, 4]
    assert batch.positions_N.tolist() == [5, 9]


def test_soft_targets_and_weights_are_kept_through_a_subset() -> None:
    rows = labelled([0, 1, 0]).with_targets(np.asarray([[0.7, 0.3], [0.1, 0.9], [0.5, 0.5]], dtype=np.float32))
    part = rows.reweighted(np.asarray([1.0, 0.5, 2.0])).subset(np.asarray([2, 1]))
    assert part.batch(np.asarray([0, 1])).labels_N.tolist() == [
        pytest.approx([2.0, 0.5, 0.5]),
        pytest.approx([0.5, 0.1, 0.9]),
    ]
    assert part.place(0) == "row 3"


@pytest.mark.parametrize(("rare", "even"), [(9, True), (18, True), (19, False), (100, False)])
def test_by_default_a_class_below_a_quarter_of_its_share_is_drawn_as_often_as_others(rare: int, even: bool) -> None:
    """Beside two classes of 100 rows, 18 are less than a quarter of 218 / 3, and 19 more than one of 219 / 3."""
    rows = labelled([0] * 100 + [1] * 100 + [2] * rare)
    found = balanced(rows, config())
    assert isinstance(found, ClassBalancedRows) == even
    if isinstance(found, ClassBalancedRows):
        assert found.sampling == "even" and abs(len(found) - len(rows)) <= 1


@pytest.mark.parametrize(
    "setting", [{"sampling": "none"}, {"logit_adjustment": 1}, {"kind": "several"}, {"kind": "pair"}]
)
def test_another_answer_to_rare_classes_or_another_kind_of_label_leaves_draws_alone(setting: dict[str, Any]) -> None:
    rows = labelled([0] * 100 + [1] * 100 + [2] * 5)
    assert balanced(rows, config(**setting)) is rows
