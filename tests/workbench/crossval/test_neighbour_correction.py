"""Predictions are drawn to their neighbours' as the equation says, by a fit that no row judges by itself."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.workbench.crossval.seeing import NUMBER, ONE, ROWS, SEVERAL, said
from workbench.config.correction_config import CorrectionConfig
from workbench.crossval import gains, neighbour_correction
from workbench.crossval.gains import Gain
from workbench.crossval.neighbour_correction import Correction, Neighbours
from workbench.data.folds.row_split import FoldAssignment
from workbench.data.labelled.labels import Floats, Labels
from workbench.errors import ConfigError

KINDS = [ONE, SEVERAL, NUMBER]
FOLD = np.arange(ROWS) % 3
ALONE = np.arange(ROWS)
PART = np.random.default_rng(7).permutation(ROWS) % 5
FITTED = CorrectionConfig(neighbours=(2, 5))


def features(targets: np.ndarray, *, noise: float, seed: int = 1) -> np.ndarray:
    """Features in which rows of one label are near each other."""
    chance = np.random.default_rng(seed)
    shown = np.concatenate([np.cos(targets / 2), np.sin(targets / 2)], axis=1)  # directions for numbers too
    return (shown + noise * chance.normal(size=shown.shape)).astype(np.float32)


def fitted(labels: Labels, values: Floats, targets: np.ndarray, known: np.ndarray, **more: Any) -> tuple[Any, Floats]:
    config = more.pop("config", FITTED)
    found = neighbour_correction.within_folds(known, FOLD, more.pop("cluster", ALONE), max(config.candidates))
    return neighbour_correction.fit(config, labels, values, targets, found, PART)


def judged(labels: Labels, values: Floats, after: Floats, targets: np.ndarray, **more: Any) -> Gain:
    return neighbour_correction.gain(FITTED, labels, values, after, targets, FOLD, PART, **more)


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float(one @ other / math.sqrt((one @ one) * (other @ other)))


def written_out(correction: Correction, own: Floats, row: np.ndarray, asked: np.ndarray, values: Floats) -> Floats:
    """The equation for one row, in loops: nearest rows by cosine, softmax of similarities, mean."""
    similarity = sorted(((cosine(row, other), number) for number, other in enumerate(asked)), reverse=True)
    weights = [math.exp(each / correction.temperature) for each, _ in similarity[: correction.neighbours]]
    consensus = np.zeros(len(own))
    for weight, (_, number) in zip(weights, similarity, strict=False):
        consensus += weight / sum(weights) * values[number]
    return (1 - correction.strength) * own + correction.strength * consensus


@pytest.mark.parametrize("labels", KINDS, ids=lambda labels: labels.kind)
def test_equals_the_equation_written_out(labels: Labels) -> None:
    (values,), _ = said(labels, [1.0])
    known = np.random.default_rng(2).normal(size=(ROWS, 8)).astype(np.float64)
    correction = Correction(neighbours=4, strength=0.3, temperature=0.2)
    found = neighbour_correction.within_folds(known, FOLD, ALONE, 6)  # more than are used
    got = correction.apply(values, correction.consensus(found, values))
    for row in range(0, ROWS, 37):
        others = np.flatnonzero((FOLD[row] == FOLD) & (np.arange(ROWS) != row))
        wanted = written_out(correction, values[row], known[row], known[others], values[others])
        np.testing.assert_allclose(got[row], wanted, rtol=1e-9)
    if labels.kind == "one":
        np.testing.assert_allclose(got.sum(1), 1)


@pytest.mark.parametrize("labels", KINDS, ids=lambda labels: labels.kind)
def test_a_new_row_asks_every_fold(labels: Labels) -> None:
    (values, other), _ = said(labels, [1.0, 2.0])
    chance = np.random.default_rng(3)
    known, rows = (chance.normal(size=(count, 8)).astype(np.float64) for count in (ROWS, 5))
    correction = Correction(neighbours=4, strength=0.3, temperature=0.2)
    got = neighbour_correction.corrected(correction, other[:5], rows, known, values, FOLD)
    for row in range(5):
        wanted = [
            written_out(correction, other[row], rows[row], known[fold == FOLD], values[fold == FOLD])
            for fold in np.unique(FOLD)
        ]
        np.testing.assert_allclose(got[row], np.mean(wanted, axis=0), rtol=1e-9)
        alone = slice(row, row + 1)
        one = neighbour_correction.corrected(correction, other[alone], rows[alone], known, values, FOLD)
        np.testing.assert_allclose(one, got[alone], rtol=1e-12), "whatever is asked beside it"
    assert not len(neighbour_correction.corrected(correction, other[:0], rows[:0], known, values, FOLD))


def test_without_strength_nothing_changes_to_the_last_bit() -> None:
    (values,), targets = said(ONE, [1.0])
    known = features(targets, noise=0.1)
    none = Correction(neighbours=4, strength=0.0, temperature=0.2)
    found = neighbour_correction.within_folds(known, FOLD, ALONE, 4)
    assert none.apply(values, none.consensus(found, values)).tobytes() == values.tobytes()
    new = neighbour_correction.corrected(none, values[:3], known[:3], known, values, FOLD)
    assert new.tobytes() == values[:3].tobytes()


def test_a_row_asks_its_own_fold_and_never_itself() -> None:
    known = np.ones((ROWS, 3), dtype=np.float32)  # all rows are equally near, the row itself too
    found = neighbour_correction.within_folds(known, FOLD, ALONE, 5)
    assert (FOLD[found.row_NK] == FOLD[:, None]).all()
    assert (found.row_NK != np.arange(ROWS)[:, None]).all()
    assert all(len(set(each)) == 5 for each in found.row_NK.tolist())
    np.testing.assert_allclose(found.similarity_NK, 1, rtol=1e-6)


@pytest.mark.parametrize("labels", KINDS, ids=lambda labels: labels.kind)
def test_noisy_predictions_of_like_rows_gain_by_each_other(labels: Labels) -> None:
    (values,), targets = said(labels, [1.0 if labels is NUMBER else 2.0])
    correction, after = fitted(labels, values, targets, features(targets, noise=0.05))
    found = judged(labels, values, after, targets)
    assert found.accepted and correction.strength > 0.3, found.sentence
    assert correction.neighbours == 5, "more witnesses"


def test_planted_copies_gain_by_each_other_where_new_rows_have_some_too() -> None:
    """Three noisy predictions of each picture, among unlike ones. Known to be copies, they do not ask each other."""
    chance = np.random.default_rng(4)
    (values,), targets = said(ONE, [2.0])
    once = np.arange(ROWS) // 9 * 3 + np.arange(ROWS) % 3  # one row in each fold is the original of three
    known = chance.normal(size=(ROWS, 16))[once] + 0.01 * chance.normal(size=(ROWS, 16))
    targets = targets[once]
    values = ONE.values(1.5 * targets + 2.0 * chance.normal(size=targets.shape))
    known = known.astype(np.float32)
    _, after = fitted(ONE, values, targets, known)
    assert judged(ONE, values, after, targets, groups_N=once).accepted
    _, after = fitted(ONE, values, targets, known, cluster=once)
    assert not judged(ONE, values, after, targets, groups_N=once).accepted
    found = neighbour_correction.within_folds(known, FOLD, once, 5)
    assert (once[found.row_NK] != once[:, None]).all() and np.isfinite(found.similarity_NK).all()


@pytest.mark.parametrize("labels", KINDS, ids=lambda labels: labels.kind)
def test_neighbours_of_no_meaning_are_refused(labels: Labels) -> None:
    (values,), targets = said(labels, [0.5])
    for seed in range(3):
        known = np.random.default_rng(seed).normal(size=(ROWS, 8)).astype(np.float32)
        _, after = fitted(labels, values, targets, known)
        assert not judged(labels, values, after, targets).accepted


def test_a_mean_of_anybody_is_not_credited_to_neighbours() -> None:
    """Numbers that are too far from their mean gain by any mean, which says nothing of similarity."""
    (values,), targets = said(NUMBER, [1.0])
    known = np.random.default_rng(0).normal(size=(ROWS, 8)).astype(np.float32)
    _, after = fitted(NUMBER, values, targets, known)
    assert gains.gain(NUMBER, values, after, targets).accepted
    found = judged(NUMBER, values, after, targets)
    assert not found.accepted and found.loss_before < gains.row_losses(NUMBER, values, targets).mean()


def test_shuffled_labels_are_refused() -> None:
    """Of labels that nobody can know, calibrated predictions are the constant ones, and no neighbour helps."""
    accepted = 0
    for seed in range(5):
        (values,), targets = said(ONE, [2.0], seed=seed)
        known = features(targets, noise=0.1)
        shuffled = np.random.default_rng(seed).permutation(targets)
        even = np.full_like(values, 1 / 3) + 0.01 * (values - 1 / 3)
        _, after = fitted(ONE, even, shuffled, known)
        accepted += judged(ONE, even, after, shuffled).accepted
    assert accepted == 0


def test_a_part_is_judged_by_what_other_parts_fitted() -> None:
    """The values of a part stay where its own labels are others; the labels of other parts change them."""
    (values,), targets = said(ONE, [2.0])
    known = features(targets, noise=0.1)
    own = PART == 2
    for rows, same in ((own, True), (~own, False)):
        others = targets.copy()
        others[rows] = np.roll(others[rows], 1, axis=1)
        before, after = (fitted(ONE, values, each, known)[1][own] for each in (targets, others))
        assert (before.tobytes() == after.tobytes()) is same


@pytest.mark.parametrize("labels", KINDS, ids=lambda labels: labels.kind)
def test_the_order_of_rows_does_not_matter(labels: Labels) -> None:
    (values,), targets = said(labels, [2.0])
    known = features(targets, noise=0.2)
    order = np.random.default_rng(5).permutation(ROWS)
    correction, after = fitted(labels, values, targets, known)
    found = neighbour_correction.within_folds(known[order], FOLD[order], ALONE, 5)
    other, moved = neighbour_correction.fit(FITTED, labels, values[order], targets[order], found, PART[order])
    assert replace(other, strength=correction.strength) == correction
    assert other.strength == pytest.approx(correction.strength, abs=1e-3)
    np.testing.assert_allclose(moved, after[order], atol=1e-2 * labels.scale)


def test_what_is_given_is_not_fitted() -> None:
    (values,), targets = said(ONE, [2.0])
    known = np.random.default_rng(6).normal(size=(ROWS, 8)).astype(np.float32)
    config = CorrectionConfig(neighbours=3, strength=0.7, temperature=0.4)
    correction, after = fitted(ONE, values, targets, known, config=config)
    assert correction == Correction(3, 0.7, 0.4)
    found: Neighbours = neighbour_correction.within_folds(known, FOLD, ALONE, 3)
    np.testing.assert_allclose(after, correction.apply(values, correction.consensus(found, values)))


def test_the_fit_is_the_lowest_point_of_a_fine_grid() -> None:
    (values,), targets = said(ONE, [2.0])
    known = features(targets, noise=0.3)
    correction, _ = fitted(ONE, values, targets, known)
    found = neighbour_correction.within_folds(known, FOLD, ALONE, 5)

    def loss(each: Correction) -> float:
        after = each.apply(values, each.consensus(found, values))
        return float(gains.row_losses(ONE, after, targets).mean())

    grid = [
        loss(Correction(count, strength, temperature))
        for count in (2, 5)
        for temperature in neighbour_correction.TEMPERATURES
        for strength in np.linspace(0, 1, 41)
    ]
    assert loss(correction) <= min(grid) + 1e-6


def test_more_neighbours_than_a_fold_has_are_refused() -> None:
    folds = FoldAssignment(np.asarray([[0, 0, 0, 1, 1, 1, 1]]), ("left", "right"))
    neighbour_correction.require_rows(CorrectionConfig(neighbours=2), folds, np.arange(7))
    neighbour_correction.require_rows(CorrectionConfig(), folds, np.zeros(7, dtype=np.int64))
    for cluster, fold in ((np.arange(7), "left"), (np.asarray([0, 1, 2, 3, 3, 3, 6]), "right")):
        config = CorrectionConfig(neighbours=(1, 3 if fold == "left" else 2))
        with pytest.raises(ConfigError, match=rf"fold {fold} has \d beside a row .* Write correction.neighbours=\d or"):
            neighbour_correction.require_rows(config, folds, cluster)


def test_changed_counts_rows_of_another_class() -> None:
    before = np.asarray([[0.6, 0.4], [0.6, 0.4], [0.1, 0.9], [0.2, 0.8]])
    after = np.asarray([[0.4, 0.6], [0.7, 0.3], [0.1, 0.9], [0.3, 0.7]])
    assert neighbour_correction.changed(Labels("one", ("a", "b")), before, after) == 0.25
    assert neighbour_correction.changed(Labels("several", ("a", "b")), before, after) == 0.25
    assert neighbour_correction.changed(NUMBER, before[:, :1], after[:, :1]) is None
