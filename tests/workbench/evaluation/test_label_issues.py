"""Planted wrong labels are found; the rule of the paper, written a second time."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import special

from workbench.evaluation.label_issues import suspected, wrong_labels


def told(rows: int, classes: int, *, noise: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    """Probabilities of a fair model, labels of which a share is wrong, and which ones are."""
    rng = np.random.default_rng(seed)
    true = rng.integers(classes, size=rows)
    p = special.softmax(2.5 * np.eye(classes)[true] + rng.normal(size=(rows, classes)), axis=1)
    wrong = rng.random(rows) < noise
    label = np.where(wrong, (true + rng.integers(1, classes, size=rows)) % classes, true)
    return p, label, wrong


def test_planted_wrong_labels_are_found() -> None:
    p, label, wrong = told(2000, 5, noise=0.1)
    found = np.asarray(list(suspected(p, label)))
    assert wrong[found].mean() > 0.75, "seven times as many as by chance"
    assert wrong[found].sum() > 0.6 * wrong.sum()
    assert wrong[found[:50]].mean() > 0.95, "the most suspect first"


def test_as_many_as_lie_off_the_diagonal_of_the_confident_joint() -> None:
    p, label, _ = told(300, 4, noise=0.15, seed=3)
    thresholds = [p[label == j, j].mean() for j in range(4)]
    off = 0
    for of, i in zip(p, label, strict=True):
        above = [j for j in range(4) if of[j] >= thresholds[j]]
        off += bool(above) and max(above, key=lambda j: of[j]) != i and of.argmax() != i
    assert wrong_labels(p, label) == off
    own = p[np.arange(300), label]
    expected = [row for row in np.argsort(own, kind="stable")[:off] if p[row].argmax() != label[row]]
    assert list(suspected(p, label)) == expected
    assert all(p[row].argmax() == other for row, other in suspected(p, label).items())


@pytest.mark.parametrize(("classes", "noise"), [(2, 0.2), (5, 0.1), (40, 0.3)])
def test_the_rows_are_those_of_cleanlab(classes: int, noise: float) -> None:
    cleanlab = pytest.importorskip("cleanlab.filter")
    p, label, _ = told(1000, classes, noise=noise, seed=classes)
    theirs = cleanlab.find_label_issues(label, p, filter_by="low_self_confidence", n_jobs=1)
    named = {int(row) for row in np.flatnonzero(theirs) if p[row].argmax() != label[row]}
    assert len(named) > 50 and set(suspected(p, label)) == named


def test_right_labels_are_not_suspected() -> None:
    p, label, _ = told(500, 3, noise=0)
    sure = np.eye(3)[label]
    assert suspected(sure, label) == {} and len(suspected(p, label)) < 0.1 * len(label)


def test_a_class_without_rows_is_nobody_s() -> None:
    assert suspected(np.eye(3)[[1, 1]], np.asarray([0, 2])) == {}
