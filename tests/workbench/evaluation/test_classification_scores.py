"""Scores of each kind of label against definitions written out, and the baseline that a run is held against."""

from __future__ import annotations

import numpy as np
import pytest

from workbench.data.labelled.labels import Labels
from workbench.evaluation import classification_scores

CHANCE = np.random.default_rng(0)
ONE = Labels("one", ("a", "b", "c"))
SEVERAL = Labels("several", ("a", "b", "c"))
NUMBER = Labels("number", ("value",), mean=10.0, scale=4.0)


def test_one_class() -> None:
    outputs, hot = CHANCE.normal(size=(40, 3)), np.eye(3, dtype=np.float32)[CHANCE.integers(0, 3, 40)]
    found = classification_scores.scores(ONE, outputs, hot)
    p = np.exp(outputs) / np.exp(outputs).sum(1, keepdims=True)
    assert found["loss"] == pytest.approx(-np.log((p * hot).sum(1)).mean(), abs=1e-6)
    assert found["accuracy"] == pytest.approx((p.argmax(1) == hot.argmax(1)).mean())
    assert found["accuracy_low"] < found["accuracy"] < found["accuracy_high"] and "log_loss" not in found


def test_several_classes() -> None:
    outputs, hot = CHANCE.normal(size=(40, 3)), (CHANCE.random((40, 3)) < 0.4).astype(np.float32)
    hot[:, 2] = 0  # a class that no row has says nothing about ranking
    found = classification_scores.scores(SEVERAL, outputs, hot)
    p = 1 / (1 + np.exp(-outputs))
    wanted = -(hot * np.log(p) + (1 - hot) * np.log(1 - p)).sum(1).mean()
    assert found["loss"] == pytest.approx(wanted, abs=1e-5)
    said, true = p >= 0.5, hot > 0.5
    both = (said & true).sum()
    assert found["micro_f1"] == pytest.approx(2 * both / (said.sum() + true.sum()), abs=1e-6)
    pairs = [np.subtract.outer(p[true[:, c], c], p[~true[:, c], c]) for c in (0, 1)]
    assert found["roc_auc"] == pytest.approx(np.mean([(each > 0).mean() for each in pairs]), abs=1e-6)


def test_numbers_are_in_the_labels_unit() -> None:
    outputs, wanted = CHANCE.normal(size=(30, 1)), CHANCE.normal(size=(30, 1)).astype(np.float32)
    found = classification_scores.scores(NUMBER, outputs, wanted)
    assert found["rmse"] == pytest.approx(4 * np.sqrt(found["loss"]), rel=1e-4)
    assert found["mae"] == pytest.approx(4 * np.abs(outputs - wanted).mean(), rel=1e-4)


@pytest.mark.parametrize("labels", [ONE, SEVERAL, NUMBER])
def test_no_constant_has_a_lower_loss_than_the_baseline(labels: Labels) -> None:
    shape = (60, len(labels.names))
    rows = np.eye(3, dtype=np.float32)[CHANCE.integers(0, 3, 60)] if labels is ONE else CHANCE.random(shape).round()
    if labels is NUMBER:
        rows = CHANCE.normal(size=shape)
    rows = rows.astype(np.float32)
    best = classification_scores.baseline(labels, rows, rows=60)
    lowest = classification_scores.loss(labels, best, rows)
    for _ in range(30):
        assert classification_scores.loss(labels, best + CHANCE.normal(scale=0.3, size=shape[1]), rows) >= lowest - 1e-9


@pytest.mark.parametrize("labels", [ONE, SEVERAL, NUMBER])
def test_scores_of_values_are_those_of_outputs(labels: Labels) -> None:
    outputs = 3 * CHANCE.normal(size=(60, len(labels.names)))
    rows = np.eye(3)[CHANCE.integers(0, 3, 60)] if labels is ONE else CHANCE.random(outputs.shape).round()
    hot = (CHANCE.normal(size=outputs.shape) if labels is NUMBER else rows).astype(np.float32)
    found = classification_scores.value_scores(labels, labels.values(outputs), hot)
    assert found == pytest.approx(classification_scores.scores(labels, outputs, hot), abs=1e-9)
    assert next(iter(found)) == "loss"


@pytest.mark.parametrize("labels", [ONE, SEVERAL, NUMBER])
def test_outputs_turn_values_back(labels: Labels) -> None:
    values = labels.values(3 * CHANCE.normal(size=(60, len(labels.names))))
    np.testing.assert_allclose(
        labels.values(classification_scores.outputs_of_values(labels, values)), values, rtol=1e-12
    )


def test_a_certain_mistake_costs_what_the_outputs_say() -> None:
    """`scores` takes outputs because probabilities lose what lies beyond the smallest float."""
    outputs, hot = np.array([[0.0, 900.0, 0.0]]), np.eye(3, dtype=np.float32)[:1]
    assert classification_scores.loss(ONE, outputs, hot) == 900
    assert classification_scores.value_scores(ONE, ONE.values(outputs), hot)["loss"] == pytest.approx(708.4, abs=0.1)
