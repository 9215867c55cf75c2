"""Intervals by resampling: those of drawing the rows themselves, which hold the score, and narrow with more rows."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn import metrics

from workbench.evaluation import bootstrap

GENERATOR = np.random.default_rng(0)


@pytest.mark.parametrize("classes", [2, 4, 11])
def test_f1_is_that_of_drawn_rows(classes: int) -> None:
    """scikit-learn's score of rows that are drawn one by one; 400 draws tell a bound to about a tenth of the width."""
    true_N = GENERATOR.integers(classes, size=150)
    predicted_N = np.where(GENERATOR.random(150) < 0.6, true_N, GENERATOR.integers(classes, size=150))
    names = np.arange(classes)
    found = bootstrap.of_f1(true_N[:, None] == names, predicted_N[:, None] == names)
    drawn = GENERATOR.integers(150, size=(400, 150))
    for average in ("micro", "macro"):
        written = [metrics.f1_score(true_N[own], predicted_N[own], average=average) for own in drawn]
        low, high = np.quantile(written, [0.025, 0.975])
        assert found[f"{average}_f1"] == pytest.approx((low, high), abs=0.2 * (high - low))
        score = metrics.f1_score(true_N, predicted_N, average=average)
        assert found[f"{average}_f1"][0] < score < found[f"{average}_f1"][1]


def test_several_classes_of_a_row_are_drawn_together() -> None:
    """Rows whose classes are all right or all wrong: so many rows vary as much as one class of each would."""
    right_N = GENERATOR.random(200) < 0.7
    true_NC = np.ones((200, 8), dtype=bool)
    low, high = bootstrap.of_f1(true_NC, np.repeat(right_N[:, None], 8, axis=1))["micro_f1"]
    one_low, one_high = bootstrap.of_f1(true_NC[:, :1], right_N[:, None])["micro_f1"]
    assert (low, high) == pytest.approx((one_low, one_high))


def test_a_class_that_nothing_has_counts_as_in_the_score() -> None:
    """Three of four classes, all right: macro-F1 is 0.75 in the set and in each of its resamples."""
    true_NC = np.eye(4, dtype=bool)[np.arange(60) % 3]
    assert bootstrap.of_f1(true_NC, true_NC) == {"micro_f1": (1.0, 1.0), "macro_f1": (0.75, 0.75)}
    assert bootstrap.of_f1(true_NC[:2], ~true_NC[:2] & False)["micro_f1"] == (0.0, 0.0)


def test_means_have_the_width_of_the_normal_interval() -> None:
    value_NS = GENERATOR.normal(size=(500, 2)) * [1.0, 3.0]
    found = bootstrap.means(("a", "b"), value_NS)
    for name, value_N in zip("ab", value_NS.T, strict=True):
        assert found[name] == pytest.approx(value_N.mean())
        assert found[f"{name}_high"] - found[f"{name}_low"] == pytest.approx(
            2 * 1.96 * value_N.std() / np.sqrt(500), rel=0.1
        )
    assert found == bootstrap.means(("a", "b"), value_NS), "of one seed"
    assert bootstrap.means(("a", "b"), value_NS[:1]).keys() == {"a", "b"}, "one row tells no spread"
