"""Planted wrong labels are found, and how sure that is told is as sure as it is."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import special

from workbench.evaluation.label_issues import label_quality, suspected


def told(
    rows: int, classes: int, *, noise: float, seed: int = 0, sure: float = 2.5
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    """Probabilities of a fair model, labels of which a share is wrong, and which ones are."""
    rng = np.random.default_rng(seed)
    true = rng.integers(classes, size=rows)
    p = special.softmax(sure * np.eye(classes)[true] + rng.normal(size=(rows, classes)), axis=1)
    wrong = rng.random(rows) < noise
    label = np.where(wrong, (true + rng.integers(1, classes, size=rows)) % classes, true)
    return p, label, wrong


def test_planted_wrong_labels_are_found() -> None:
    p, label, wrong = told(2000, 5, noise=0.1)
    found = np.asarray(list(suspected(p, label)))
    assert wrong[found].mean() > 0.8, "eight times as many as by chance"
    assert wrong[found].sum() > 0.6 * wrong.sum()
    assert wrong[found[:50]].mean() > 0.95, "the most suspect first"


def test_quality_is_the_probability_that_a_label_is_right() -> None:
    """Of a model that is fair of the true classes, for any temperature that it is told at."""
    p, label, wrong = told(20000, 4, noise=0.2, seed=1)
    quality = label_quality(p, label)
    for low in np.arange(0, 1, 0.2):
        mine = (quality >= low) & (quality < low + 0.2)
        assert abs(quality[mine].mean() - (~wrong[mine]).mean()) < 0.05
    cold = special.softmax(np.log(p) * 0.3, axis=1)
    np.testing.assert_allclose(label_quality(cold, label), quality, atol=0.02)


def test_suspects_are_in_the_order_of_their_quality_and_of_another_class() -> None:
    p, label, _ = told(300, 4, noise=0.15, seed=3)
    quality, found = label_quality(p, label), suspected(p, label)
    assert list(quality[list(found)]) == sorted(quality[list(found)])
    assert all(p[row].argmax() == other != label[row] and quality[row] < 0.5 for row, other in found.items())


@pytest.mark.parametrize(("classes", "noise"), [(4, 0.1), (12, 0.2)])
def test_the_mistakes_of_a_model_are_taken_for_wrong_labels_less_than_by_cleanlab(classes: int, noise: float) -> None:
    """As many planted ones among those that are named, and more of what is named is planted."""
    from cleanlab import filter as cleanlab

    p, label, wrong = told(3000, classes, noise=noise, seed=classes, sure=1.2)
    theirs = cleanlab.find_label_issues(label, p, filter_by="confident_learning", n_jobs=1)
    ours = np.zeros(len(label), dtype=bool)
    ours[list(suspected(p, label))] = True
    assert ours.sum() > 50 and wrong[ours].mean() > wrong[theirs].mean() + 0.05


def test_right_labels_are_not_suspected() -> None:
    p, label, _ = told(500, 3, noise=0)
    sure = np.eye(3)[label]
    assert suspected(sure, label) == {} and len(suspected(p, label)) < 0.1 * len(label)


def test_a_class_without_rows_is_nobody_s() -> None:
    assert suspected(np.eye(3)[[1, 1]], np.asarray([0, 2])) == {}
