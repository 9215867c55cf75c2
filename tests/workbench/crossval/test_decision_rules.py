"""Rules name rare classes where a metric gains by it, and leave alone what is best as it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import f1_score

from workbench.config.sections import metrics
from workbench.config.sections.metrics import METRICS, Choice
from workbench.crossval import decision_rules
from workbench.data.labelled.labels import Labels

ONE, SEVERAL = Labels("one", ("a", "b", "c")), Labels("several", ("a", "b", "c"))


def rare(labels: Labels, rows: int = 4000) -> tuple[np.ndarray, np.ndarray]:
    """Calibrated probabilities (N, C) of classes of which the last is rare, and targets drawn by them."""
    chance = np.random.default_rng(0)
    p_NC = labels.values(chance.normal(size=(rows, 3)) + np.array([2.0, 0.5, -1.0]))
    if labels.kind == "several":
        return p_NC, (chance.random(p_NC.shape) < p_NC).astype(np.float32)
    return p_NC, np.eye(3, dtype=np.float32)[(chance.random((rows, 1)) > p_NC.cumsum(1)[:, :2]).sum(1)]


@pytest.mark.parametrize("labels", [ONE, SEVERAL], ids=["one", "several"])
def test_macro_f1_gains_on_other_rows_and_no_multiple_is_better(labels: Labels) -> None:
    labels = replace(labels, metric=metrics.choice("macro_f1", None))
    p_NC, targets_NC = rare(labels)
    shift = decision_rules.fit(labels, p_NC[:2000], targets_NC[:2000])
    assert shift[2] > shift[1] >= shift[0] >= 0

    def score(shift: tuple[float, ...], rows: slice) -> float:
        moved_NC = labels.moved(p_NC[rows], shift)
        said_NC = moved_NC >= 0.5 if labels.kind == "several" else np.eye(3)[moved_NC.argmax(1)]
        return float(f1_score(targets_NC[rows] > 0.5, said_NC > 0.5, average="macro"))

    fitted, others = slice(0, 2000), slice(2000, None)
    assert score(shift, others) > score((0.0, 0.0, 0.0), others) + 0.02
    rare_C = np.log(targets_NC[fitted].sum(0).max() + 1) - np.log(targets_NC[fitted].sum(0) + 1)
    assert score(shift, fitted) == max(
        score(tuple(share * rare_C + added), fitted)
        for share in decision_rules.SHARES
        for added in (decision_rules.LOWER if labels.kind == "several" else [0.0])
    )


def test_a_score_that_cannot_gain_moves_nothing() -> None:
    labels = replace(ONE, metric=metrics.choice("accuracy", None))
    hot_NC = np.eye(3, dtype=np.float32)[[0, 0, 0, 1, 2]]
    assert decision_rules.fit(labels, hot_NC * 0.8 + 0.1, hot_NC) == (0.0, 0.0, 0.0)


def test_a_shift_chooses_labels_and_leaves_probabilities() -> None:
    p_NC = np.array([[0.6, 0.3, 0.1], [0.9, 0.1, 0.0], [1.0, 0.0, 0.0]])
    shifted = replace(ONE, shift=(0.0, float(np.log(3)), 0.0))
    assert ONE.predicted(p_NC) == ["a", "a", "a"] and shifted.predicted(p_NC) == ["b", "a", "a"]
    several = replace(SEVERAL, shift=(0.0, float(np.log(3)), 0.0))
    assert several.predicted(np.array([[0.6, 0.25, 0.4], [0.5, 0.24, 0.0]])) == [("a", "b"), ("a",)]
    assert "shift" not in ONE.facts and shifted.facts["shift"] == shifted.shift
    assert "`b` 3.0" in decision_rules.in_words(ONE, shifted.shift)
    assert "`b` 0.25" in decision_rules.in_words(SEVERAL, several.shift)


def test_metrics_of_labels_are_those_that_probabilities_do_not_change() -> None:
    chance = np.random.default_rng(1)
    for name, metric in METRICS.items():
        if "one" not in metric.kinds:
            continue
        p_NC = chance.dirichlet(np.ones(3), 60)
        own = metrics.JudgedRows(np.arange(60) % 3, p_NC.argmax(1), p_NC, np.arange(3.0))
        other = own._replace(p_NC=chance.dirichlet(np.ones(3), 60))
        assert (metric.score(own) == metric.score(other)) == metric.of_labels, name


def test_numbers_and_scores_of_probabilities_have_no_rule() -> None:
    own = Choice("mine", higher=True, file=Path("mine.py"))
    assert decision_rules.fits(replace(ONE, metric=own)) and not decision_rules.fits(ONE)
    assert not decision_rules.fits(replace(ONE, metric=metrics.choice("roc_auc", None)))
    assert not decision_rules.fits(Labels("number", ("value",), metric=metrics.choice("qwk", None)))
