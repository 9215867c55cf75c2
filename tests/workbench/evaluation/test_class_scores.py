"""Scores of probabilities: equations written again, and what perfect and blind predictions must get."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from workbench.evaluation import class_scores

GENERATOR = np.random.default_rng(0)
P = GENERATOR.dirichlet(np.ones(4), size=200)
LABELS = np.array([GENERATOR.choice(4, p=row) for row in P])


def test_the_equations_written_again() -> None:
    found = class_scores.scores(P, LABELS)
    truth = P[np.arange(200), LABELS]
    assert found["accuracy"] == pytest.approx((P.argmax(1) == LABELS).mean())
    assert found["log_loss"] == pytest.approx(-np.log(truth).mean())
    assert found["brier"] == pytest.approx(np.mean((P**2).sum(1) - truth**2 + (1 - truth) ** 2))
    f1 = []
    for number in range(4):
        predicted, true = P.argmax(1) == number, number == LABELS
        f1.append(2 * (predicted & true).sum() / (predicted.sum() + true.sum()))
    assert found["macro_f1"] == pytest.approx(np.mean(f1))


def test_perfect_and_blind() -> None:
    perfect = class_scores.scores(np.eye(4)[LABELS], LABELS)
    assert (perfect["accuracy"], perfect["macro_f1"], perfect["calibration_error"]) == (1, 1, 0)
    assert perfect["log_loss"] < 1e-9 and perfect["brier"] == 0
    blind = class_scores.scores(np.full((200, 4), 0.25), LABELS)
    assert blind["log_loss"] == pytest.approx(np.log(4)) and blind["brier"] == pytest.approx(0.75)


def test_a_mean_that_rounding_puts_above_1_is_scored() -> None:
    p = np.eye(4)[LABELS] * np.nextafter(1.0, 2.0)
    assert class_scores.scores(p, LABELS) == class_scores.scores(np.eye(4)[LABELS], LABELS)


def test_labels_drawn_from_the_probabilities_are_calibrated_and_sharpened_ones_are_not() -> None:
    p = GENERATOR.dirichlet(np.ones(3), size=20_000)
    labels = (p.cumsum(1) > GENERATOR.random((20_000, 1))).argmax(1)
    sharp = p**4 / (p**4).sum(1, keepdims=True)
    assert class_scores.calibration_error(p, labels) < 0.015 < 0.1 < class_scores.calibration_error(sharp, labels)


def test_two_classes_have_an_area_under_the_curve() -> None:
    p = GENERATOR.random(100)
    labels = (GENERATOR.random(100) < p).astype(np.int64)
    positives, negatives = p[labels == 1], p[labels == 0]
    wanted = (positives[:, None] > negatives[None]).mean()
    assert class_scores.scores(np.stack((1 - p, p), 1), labels)["roc_auc"] == pytest.approx(wanted)
    assert "roc_auc" not in class_scores.scores(P, LABELS)


@given(st.integers(1, 400), st.floats(0, 1))
def test_the_interval_holds_its_mean_and_narrows(rows: int, share: float) -> None:
    hits = round(share * rows)
    found, more = class_scores.accuracy_interval(hits, rows), class_scores.accuracy_interval(100 * hits, 100 * rows)
    assert 0 <= found.low <= found.mean <= found.high <= 1
    assert more.high - more.low < found.high - found.low


@given(st.integers(1, 400), st.integers(0, 800))
def test_the_interval_is_wilsons_and_moves_with_half_a_hit(rows: int, halves: int) -> None:
    hits = min(halves, 2 * rows) / 2
    whole = math.floor(hits)
    bounds = stats.binomtest(whole, rows).proportion_ci(method="wilson")
    found = class_scores.accuracy_interval(whole, rows)
    assert (found.low, found.high) == pytest.approx((bounds.low, bounds.high), abs=1e-12)
    if whole < hits:
        between = class_scores.accuracy_interval(hits, rows)
        assert found.low < between.low and found.high < between.high


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    hits = GENERATOR.binomial(50, 0.9, size=4000)
    found = [class_scores.accuracy_interval(int(n), 50) for n in hits]
    assert 0.93 < np.mean([each.low <= 0.9 <= each.high for each in found]) < 0.98
