"""Predictions are drawn to their neighbours' as the equation says, by a fit that no row judges by itself.

The rows that predictions are corrected by are read as they were written, and compared without what all share.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.workbench.crossval.seeing import NUMBER, ONE, ROWS, SEVERAL, said
from workbench.config.sections.correction_config import Ask, CorrectionConfig
from workbench.crossval import gains, neighbour_correction
from workbench.crossval.gains import Gain
from workbench.crossval.neighbour_correction import AnsweringRows, Correction, NeighbourBank
from workbench.data.folds.stratified_folds import FoldAssignment
from workbench.data.labelled.labels import Floats, Labels
from workbench.errors import ConfigError

KINDS = pytest.mark.parametrize("labels", [ONE, SEVERAL, NUMBER], ids=lambda labels: labels.kind)
ASKS = pytest.mark.parametrize("ask", ["predictions", "labels"])
FOLD = np.arange(ROWS) % 3
ALONE = np.arange(ROWS)
PART = np.random.default_rng(7).permutation(ROWS) % 5
HAZE = np.random.default_rng(3).normal(size=(ROWS, 8))
"""Features that say nothing."""


def asking(ask: str, *neighbours: int, **more: Any) -> CorrectionConfig:
    return CorrectionConfig.model_validate({"neighbours": neighbours or (2, 5), "ask": ask, **more})


def features(targets: np.ndarray, *, noise: float) -> np.ndarray:
    """Features in which rows of one label are near each other."""
    shown = np.concatenate([np.cos(targets / 2), np.sin(targets / 2)], axis=1)  # directions for numbers too
    return (shown + noise * np.random.default_rng(1).normal(size=shown.shape)).astype(np.float32)


def asked(
    config: CorrectionConfig,
    labels: Labels,
    values: Floats,
    targets: np.ndarray,
    known: np.ndarray,
    *,
    cluster: np.ndarray = ALONE,
    fold: np.ndarray = FOLD,
) -> dict[Ask, AnsweringRows]:
    answers = neighbour_correction.answers(labels, values, targets)
    count = max(config.candidates)
    return {
        ask: AnsweringRows(neighbour_correction.across_folds(ask, known, fold, cluster, count), answers[ask])
        for ask in config.asked
    }


def fitted(
    config: CorrectionConfig, labels: Labels, values: Floats, targets: np.ndarray, known: np.ndarray, **more: Any
) -> tuple[Correction, Floats]:
    rows = asked(config, labels, values, targets, known, **more)
    return neighbour_correction.fit(config, labels, values, targets, rows, PART)


def judged(labels: Labels, values: Floats, after: Floats, targets: np.ndarray, **more: Any) -> Gain:
    return neighbour_correction.gain(CorrectionConfig(), labels, values, after, targets, FOLD, PART, **more)


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float(one @ other / math.sqrt((one @ one) * (other @ other)))


def written_out(correction: Correction, own: Floats, row: np.ndarray, known: np.ndarray, answers: Floats) -> Floats:
    """The equation for one row, in loops: nearest rows by cosine, softmax of similarities, mean."""
    similarity = sorted(((cosine(row, other), number) for number, other in enumerate(known)), reverse=True)
    weights = [math.exp(each / correction.temperature) for each, _ in similarity[: correction.neighbours]]
    consensus = np.zeros(len(own))
    for weight, (_, number) in zip(weights, similarity, strict=False):
        consensus += weight / sum(weights) * answers[number]
    return (1 - correction.strength) * own + correction.strength * consensus


@KINDS
@ASKS
def test_equals_the_equation_written_out(labels: Labels, ask: Ask) -> None:
    (values,), targets = said(labels, [1.0])
    correction = Correction(ask, neighbours=4, strength=0.3, temperature=0.2)
    rows = asked(asking(ask, 6), labels, values, targets, HAZE)[ask]  # more than are used
    got = correction.apply(values, correction.consensus(rows.nearest, rows.answers_NC))
    answers = values if ask == "predictions" else labels.values(targets) if labels is NUMBER else targets
    for row in range(0, ROWS, 37):
        others = np.flatnonzero(((FOLD[row] == FOLD) == (ask == "predictions")) & (np.arange(ROWS) != row))
        wanted = written_out(correction, values[row], HAZE[row], HAZE[others], answers[others])
        np.testing.assert_allclose(got[row], wanted, rtol=1e-6)
    if labels.kind == "one":
        np.testing.assert_allclose(got.sum(1), 1)


@ASKS
def test_a_new_row_hears_what_the_rows_of_each_fold_hear(ask: Ask) -> None:
    (values, other), _ = said(ONE, [1.0, 2.0])
    rows = np.random.default_rng(4).normal(size=(5, 8))
    correction = Correction(ask, neighbours=4, strength=0.3, temperature=0.2)
    got = neighbour_correction.corrected(correction, other[:5], rows, HAZE, values, FOLD)
    for row in range(5):
        heard = [(fold == FOLD) == (ask == "predictions") for fold in np.unique(FOLD)]
        wanted = [written_out(correction, other[row], rows[row], HAZE[each], values[each]) for each in heard]
        np.testing.assert_allclose(got[row], np.mean(wanted, axis=0), rtol=1e-9)
        alone = slice(row, row + 1)
        one = neighbour_correction.corrected(correction, other[alone], rows[alone], HAZE, values, FOLD)
        np.testing.assert_allclose(one, got[alone], rtol=1e-12, err_msg="whatever is asked beside it")
    assert not len(neighbour_correction.corrected(correction, other[:0], rows[:0], HAZE, values, FOLD))


@ASKS
def test_without_strength_nothing_changes_to_the_last_bit(ask: Ask) -> None:
    (values,), targets = said(ONE, [1.0])
    none = Correction(ask, neighbours=4, strength=0.0, temperature=0.2)
    rows = asked(asking(ask, 4), ONE, values, targets, HAZE)[ask]
    assert none.apply(values, none.consensus(rows.nearest, rows.answers_NC)).tobytes() == values.tobytes()
    new = neighbour_correction.corrected(none, values[:3], HAZE[:3], HAZE, values, FOLD)
    assert new.tobytes() == values[:3].tobytes()


@ASKS
def test_a_row_asks_no_row_that_knows_its_label_and_never_itself(ask: Ask) -> None:
    known = np.ones((ROWS, 3), dtype=np.float32)  # all rows are equally near, the row itself too
    cluster = np.arange(ROWS) // 9
    found = neighbour_correction.across_folds(ask, known, FOLD, cluster, 5)
    assert ((FOLD[found.row_NK] == FOLD[:, None]) == (ask == "predictions")).all()
    assert (cluster[found.row_NK] != cluster[:, None]).all(), "nor its near-duplicates"
    assert all(len(set(each)) == 5 for each in found.row_NK.tolist())
    np.testing.assert_allclose(found.similarity_NK, 1, rtol=1e-6)


def test_rows_are_compared_in_pieces() -> None:
    many = np.random.default_rng(8).normal(size=(2 * neighbour_correction.ROWS_AT_ONCE + 3, 8))
    whole = neighbour_correction.nearest(many, HAZE, 5)
    for row in (0, 255, 256, 514):
        one = neighbour_correction.nearest(many[row : row + 1], HAZE, 5)
        np.testing.assert_array_equal(one.row_NK[0], whole.row_NK[row])


@pytest.mark.nightly(but="each value once")
@KINDS
@ASKS
def test_noisy_predictions_of_like_rows_gain_by_each_other(labels: Labels, ask: Ask) -> None:
    (values,), targets = said(labels, [1.0 if labels is NUMBER else 2.0])
    correction, after = fitted(asking(ask), labels, values, targets, features(targets, noise=0.05))
    found = judged(labels, values, after, targets)
    assert found.accepted and correction.strength > 0.3, found.sentence
    if ask == "predictions":
        assert correction.neighbours == 5, "more witnesses"


def test_what_is_asked_is_what_helps_more() -> None:
    (good,), targets = said(ONE, [0.7])
    known = features(targets, noise=0.05)
    values = good.copy()
    values[::2] = 1 / 3  # half of the rows know nothing, and their neighbours do
    assert fitted(asking("auto"), ONE, values, targets, known)[0].ask == "labels"
    wrong = np.roll(targets, 1, axis=0)  # labels that are no good
    rows = asked(asking("auto"), ONE, values, wrong, known)
    correction, _ = neighbour_correction.fit(asking("auto"), ONE, values, targets, rows, PART)
    assert correction.ask == "predictions"


def test_planted_copies_gain_by_each_other_unless_known_to_be_copies() -> None:
    """Three noisy predictions of each picture, among unlike ones. New rows have no copies to ask."""
    chance = np.random.default_rng(4)
    once = np.arange(ROWS) // 9 * 3 + np.arange(ROWS) % 3  # a picture and its copies share a fold
    known = chance.normal(size=(ROWS, 16))[once] + 0.01 * chance.normal(size=(ROWS, 16))
    targets = said(ONE, [1.0])[1][once]
    values = ONE.values(1.5 * targets + 2.0 * chance.normal(size=targets.shape))
    _, after = fitted(asking("predictions"), ONE, values, targets, known)
    assert judged(ONE, values, after, targets, groups_N=once).accepted
    _, after = fitted(asking("predictions"), ONE, values, targets, known, cluster=once)
    assert not judged(ONE, values, after, targets, groups_N=once).accepted


@pytest.mark.nightly(but="each value once")
@KINDS
@ASKS
def test_neighbours_of_no_meaning_are_refused(labels: Labels, ask: Ask) -> None:
    (values,), targets = said(labels, [0.5])
    for seed in range(3):
        known = np.random.default_rng(seed).normal(size=(ROWS, 8)).astype(np.float32)
        _, after = fitted(asking(ask), labels, values, targets, known)
        assert not judged(labels, values, after, targets).accepted


def test_a_mean_of_anybody_is_not_credited_to_neighbours() -> None:
    """Numbers that are too far from their mean gain by any mean, which says nothing of similarity."""
    (values,), targets = said(NUMBER, [1.0])
    _, after = fitted(asking("auto"), NUMBER, values, targets, HAZE)
    assert gains.gain(NUMBER, values, after, targets).accepted
    found = judged(NUMBER, values, after, targets)
    assert not found.accepted and found.loss_before < gains.row_losses(NUMBER, values, targets).mean()


def test_shuffled_labels_are_refused() -> None:
    """Of labels that nobody can know, calibrated predictions are the constant ones, and no neighbour helps."""
    accepted = 0
    for seed in range(5):
        (values,), targets = said(ONE, [2.0], seed=seed)
        shuffled = np.random.default_rng(seed).permutation(targets)
        even = np.full_like(values, 1 / 3) + 0.01 * (values - 1 / 3)
        _, after = fitted(asking("auto"), ONE, even, shuffled, features(targets, noise=0.1))
        accepted += judged(ONE, even, after, shuffled).accepted
    assert accepted == 0


def test_a_part_is_judged_by_what_other_parts_fitted() -> None:
    """The values of a part stay where its own labels are others; the labels of other parts change them."""
    (values,), targets = said(ONE, [2.0])
    known, own = features(targets, noise=0.1), PART == 2
    for rows, same in ((own, True), (~own, False)):
        others = targets.copy()
        others[rows] = np.roll(others[rows], 1, axis=1)
        before, after = (fitted(asking("predictions"), ONE, values, each, known)[1][own] for each in (targets, others))
        assert (before.tobytes() == after.tobytes()) is same


@KINDS
def test_the_order_of_rows_does_not_matter(labels: Labels) -> None:
    (values,), targets = said(labels, [2.0])
    known = features(targets, noise=0.2)
    order = np.random.default_rng(5).permutation(ROWS)
    correction, after = fitted(asking("auto"), labels, values, targets, known)
    rows = asked(asking("auto"), labels, values[order], targets[order], known[order], fold=FOLD[order])
    other, moved = neighbour_correction.fit(asking("auto"), labels, values[order], targets[order], rows, PART[order])
    assert replace(other, strength=correction.strength) == correction
    assert other.strength == pytest.approx(correction.strength, abs=1e-3)
    np.testing.assert_allclose(moved, after[order], atol=1e-2 * labels.scale)


def test_what_is_given_is_not_fitted() -> None:
    (values,), targets = said(ONE, [2.0])
    config = asking("labels", 3, strength=0.7, temperature=0.4)
    correction, after = fitted(config, ONE, values, targets, HAZE)
    assert correction == Correction("labels", 3, 0.7, 0.4)
    rows = asked(config, ONE, values, targets, HAZE)["labels"]
    np.testing.assert_allclose(after, correction.apply(values, correction.consensus(rows.nearest, rows.answers_NC)))


def test_the_fit_is_the_lowest_point_of_a_fine_grid() -> None:
    (values,), targets = said(ONE, [2.0])
    known = features(targets, noise=0.3)
    correction, _ = fitted(asking("auto"), ONE, values, targets, known)
    rows = asked(asking("auto"), ONE, values, targets, known)

    def loss(each: Correction) -> float:
        after = each.apply(values, each.consensus(rows[each.ask].nearest, rows[each.ask].answers_NC))
        return float(gains.row_losses(ONE, after, targets).mean())

    grid = [
        loss(Correction(ask, count, strength, temperature))
        for ask in rows
        for count in (2, 5)
        for temperature in neighbour_correction.TEMPERATURES
        for strength in np.linspace(0, 1, 41)
    ]
    assert loss(correction) <= min(grid) + 1e-6


def test_more_neighbours_than_a_row_may_ask_are_refused() -> None:
    folds = FoldAssignment(np.asarray([[0, 0, 0, 1, 1, 1, 1]]), ("left", "right"))
    for config in (asking("auto", 2), asking("labels", 3), CorrectionConfig()):
        assert neighbour_correction.fitting(config, folds, np.arange(7)) == (config, [])
    for cluster, ask, fold, most in (
        (np.arange(7), "auto", "left", 2),
        (np.asarray([0, 1, 2, 3, 3, 3, 6]), "predictions", "right", 1),
        (np.arange(7), "labels", "right", 3),
    ):
        cure = rf"fold {fold} has {most} beside its near-duplicates. Write correction.neighbours={most} or less"
        with pytest.raises(ConfigError, match=cure):
            neighbour_correction.fitting(asking(ask, most + 1, most + 3), folds, cluster)
        some, (note,) = neighbour_correction.fitting(asking(ask, most + 1, most, 9), folds, cluster)
        assert some == asking(ask, most) and f"neighbours: {most + 1}, 9 left out, and {most} tried" in note
        assert f"fold {fold} has {most} rows" in note
    with pytest.raises(ConfigError, match="Leave correction out"):
        neighbour_correction.fitting(asking("predictions", 1), folds, np.asarray([0, 0, 0, 3, 3, 3, 3]))


def test_changed_counts_rows_of_another_class() -> None:
    before = np.asarray([[0.6, 0.4], [0.6, 0.4], [0.1, 0.9], [0.2, 0.8]])
    after = np.asarray([[0.4, 0.6], [0.7, 0.3], [0.1, 0.9], [0.3, 0.7]])
    assert neighbour_correction.changed(Labels("one", ("a", "b")), before, after) == 0.25
    assert neighbour_correction.changed(Labels("several", ("a", "b")), before, after) == 0.25
    assert neighbour_correction.changed(NUMBER, before[:, :1], after[:, :1]) is None


ASKS_NEIGHBOUR_BANK = pytest.mark.parametrize("ask", ["predictions", "labels"])


@pytest.fixture
def bank() -> NeighbourBank:
    chance = np.random.default_rng(0)
    features = chance.normal(size=(30, 6)).astype(np.float32)
    said: dict[Ask, np.ndarray] = {
        "predictions": chance.dirichlet([1.0] * 3, size=30),
        "labels": np.eye(3)[chance.integers(0, 3, 30)],
    }
    return NeighbourBank(features, np.arange(30) % 3, said)


@ASKS_NEIGHBOUR_BANK
def test_a_bank_says_the_same_after_it_was_read_again(bank: NeighbourBank, ask: Ask, tmp_path: Path) -> None:
    bank.save(tmp_path)
    correction, rows = Correction(ask, 4, 0.5, 0.1), np.random.default_rng(1).normal(size=(7, 6)).astype(np.float32)
    values = np.full((7, 3), 1 / 3)
    wanted = bank.corrected(correction, values, rows)
    assert neighbour_correction.read_bank(tmp_path).corrected(correction, values, rows).tobytes() == wanted.tobytes()
    assert np.abs(wanted - values).max() > 0.01
    np.testing.assert_allclose(wanted.sum(1), 1)


@ASKS_NEIGHBOUR_BANK
def test_what_all_rows_share_makes_none_of_them_similar(bank: NeighbourBank, ask: Ask) -> None:
    moved = bank._replace(features_ND=bank.features_ND + 50)
    found, other = (each.neighbours([ask], np.arange(30), 5)[ask].nearest for each in (bank, moved))
    np.testing.assert_array_equal(found.row_NK, other.row_NK)
    np.testing.assert_allclose(found.similarity_NK, other.similarity_NK, atol=1e-4)


def test_a_copy_of_a_labelled_row_hears_that_row_first(bank: NeighbourBank) -> None:
    correction = Correction("predictions", 1, 1.0, 0.1)
    heard = bank.corrected(correction, np.zeros((1, 3)), bank.features_ND[4:5])
    own = bank.answers["predictions"]
    nearest = [own[4]]  # of its own fold; of the two others, the nearest one
    centred = bank.features_ND - bank.features_ND.mean(0)
    unit = centred / np.linalg.norm(centred, axis=1, keepdims=True)
    for fold in (0, 2):
        rows = np.flatnonzero(bank.fold_N == fold)
        nearest.append(own[rows[(unit[rows] @ unit[4]).argmax()]])
    np.testing.assert_allclose(heard[0], np.mean(nearest, axis=0), rtol=1e-6)
