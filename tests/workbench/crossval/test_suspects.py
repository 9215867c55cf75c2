"""A fold trains without suspects that its own rows had no say in, and is judged by rows that flatter no one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from workbench.crossval import suspects
from workbench.crossval.fold_adapters import fold_adapters
from workbench.data.folds.stratified_folds import FoldAssignment, assign, singletons
from workbench.data.labelled.labels import Labels
from workbench.errors import DataError

ROWS, C = 240, 4
LABELS = Labels("one", ("east", "north", "south", "west"))
Case = tuple[FoldAssignment, Any, Any, Any]


@pytest.fixture
def case() -> Case:
    """Folds of two repeats, targets with planted wrong ones, outputs of adapters that know, and which are planted."""
    chance = np.random.default_rng(0)
    true_N = np.arange(ROWS) % C
    wrong_N = chance.random(ROWS) < 0.1
    said_N = np.where(wrong_N, (true_N + chance.integers(1, C, size=ROWS)) % C, true_N)
    strata = [(int(each),) for each in said_N]
    folds = assign(strata, groups=singletons([str(n) for n in range(ROWS)]), k=4, repeats=2)
    pairs = suspects.leave_two_out(folds)
    outputs = 4 * np.eye(C)[true_N] + chance.normal(size=(len(pairs), ROWS, C))
    outputs *= np.stack([each.split.validation_N for each in pairs])[:, :, None]
    return folds, np.eye(C, dtype=np.float32)[said_N], outputs, wrong_N


def test_each_two_folds_are_left_out_once(case: Case) -> None:
    folds = case[0]
    pairs = suspects.leave_two_out(folds)
    assert len(pairs) == 2 * 6 and len({each.name for each in pairs}) == len(pairs)
    for each in pairs:
        left = set(folds.fold_RN[each.split.repeat][each.split.validation_N])
        assert left == {each.split.fold, each.also}
        assert (each.split.train_N ^ each.split.validation_N).all()


def test_planted_labels_are_dropped_from_training_alone(case: Case) -> None:
    folds, targets, outputs, wrong = case
    members = fold_adapters(folds, seeds=2)
    found = suspects.dropped(LABELS, targets, members, suspects.leave_two_out(folds), outputs)
    for each, dropped in zip(members, found, strict=True):
        assert not (dropped & each.split.validation_N).any()
        assert wrong[dropped].mean() > 0.8 and (dropped & wrong).sum() > 0.6 * (wrong & each.split.train_N).sum()
        cleaned = each.without(dropped)
        assert not (cleaned.split.train_N & dropped).any() and cleaned.name == each.name
        assert np.array_equal(cleaned.split.validation_N, each.split.validation_N)
        assert cleaned.passes * cleaned.split.train_N.sum() == pytest.approx(each.split.train_N.sum()), "as many draws"
    assert np.array_equal(found[0], found[1]), "the seeds of a fold learn from the same rows"


def test_the_rows_of_a_fold_have_no_say_in_what_it_drops(case: Case) -> None:
    """Neither their labels, nor what adapters that trained on them say of others; those of other folds do."""
    folds, targets, outputs, _ = case
    members, pairs = fold_adapters(folds, seeds=1), suspects.leave_two_out(folds)
    before = suspects.dropped(LABELS, targets, members, pairs, outputs)
    chance = np.random.default_rng(1)
    for number, each in enumerate(members):
        knew = [not (each.split.validation_N & ~pair.split.validation_N).any() for pair in pairs]
        others = np.where(np.asarray(knew)[:, None, None], outputs, chance.normal(size=outputs.shape))
        own = targets.copy()
        own[each.split.validation_N] = np.roll(own[each.split.validation_N], 1, axis=1)
        after = suspects.dropped(LABELS, own, members, pairs, others)
        assert np.array_equal(before[number], after[number])
    assert not all(np.array_equal(one, other) for one, other in zip(before, after, strict=True)), "the test can fail"


def test_at_most_half_of_a_class_is_dropped() -> None:
    targets = np.eye(2, dtype=np.float32)[[0] * 40 + [1] * 6]
    values = np.tile([0.9, 0.1], (46, 1))
    values[:20] = [0.4, 0.6]
    values[45] = [0.45, 0.55]
    found = suspects.suspected(targets, values)
    assert found[40:].sum() <= 3 and found[:40].sum() <= 20


def test_folds_that_leave_too_little_are_refused(case: Case) -> None:
    folds, targets, *_ = case
    suspects.require_classes(folds, LABELS, targets)
    with pytest.raises(DataError, match=r"folds\.k=3 or more"):
        suspects.require_classes(FoldAssignment(folds.fold_RN % 2, ("0", "1")), LABELS, targets)
    rare = targets.copy()
    rare[targets.argmax(1) == 3] = np.eye(C)[2]
    rare[:2] = np.eye(C)[3]
    with pytest.raises(DataError, match=r"class west has rows in [12]"):
        suspects.require_classes(folds, LABELS, rare)


def test_the_cost_is_told(case: Case) -> None:
    """Rows that are trained on, counted from the splits themselves."""
    folds = case[0]
    rows = [
        sum(int(each.split.train_N.sum()) for each in who) for who in (suspects.leave_two_out(folds), members(folds))
    ]
    assert f"{1 + rows[0] / rows[1]:.1f} times" in suspects.sentence(folds, seeds=1)


def members(folds: FoldAssignment) -> Any:
    return fold_adapters(folds, seeds=1)
