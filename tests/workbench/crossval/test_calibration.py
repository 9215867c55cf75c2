"""Temperatures against what they must undo, and that no row is judged by a fit that saw it."""

from __future__ import annotations

import numpy as np
import pytest

from workbench.crossval import ensembles
from workbench.data.labelled.labels import Floats, Labels
from workbench.evaluation import classification_scores

ONE = Labels("one", ("a", "b", "c"))
SEVERAL = Labels("several", ("a", "b", "c"))
NUMBER = Labels("number", ("value",), mean=10.0, scale=4.0)


def _calibrated(labels: Labels, *, rows: int = 4000, seed: int = 0) -> tuple[Floats, np.ndarray]:
    """Outputs, and labels drawn with just the probabilities that they claim."""
    chance = np.random.default_rng(seed)
    outputs = 2 * chance.normal(size=(rows, 3))
    p = labels.values(outputs)
    if labels.kind == "several":
        return outputs, (chance.random(p.shape) < p).astype(np.float32)
    return outputs, np.eye(3, dtype=np.float32)[(chance.random((rows, 1)) > p.cumsum(1)[:, :2]).sum(1)]


@pytest.mark.parametrize("labels", [ONE, SEVERAL])
def test_calibrated_outputs_need_none_and_a_scale_is_found(labels: Labels) -> None:
    outputs, hot = _calibrated(labels)
    plain = ensembles.temperature(labels, outputs, hot)
    assert plain == pytest.approx(1, abs=0.05)
    for scale in (0.2, 0.7, 3.0, 8.0):
        found = ensembles.temperature(labels, scale * outputs, hot)
        assert found / plain == pytest.approx(scale, rel=1e-4)  # it moves with the scale, to the search's precision


@pytest.mark.parametrize("labels", [ONE, SEVERAL])
@pytest.mark.parametrize("rows", [3, 30, 300])
def test_the_loss_never_rises(labels: Labels, rows: int) -> None:
    for seed in range(20):
        outputs, hot = _calibrated(labels, rows=rows, seed=seed)
        for scale in (0.5, 1.0, 5.0, 100.0):
            found = ensembles.temperature(labels, scale * outputs, hot)
            assert ensembles.COLDEST <= found <= ensembles.HOTTEST
            after = classification_scores.loss(labels, scale * outputs / found, hot)
            assert after <= classification_scores.loss(labels, scale * outputs, hot)


def test_rows_that_are_all_right_ask_for_no_certainty() -> None:
    """Few rows allow less confidence than many, and none allows the bound."""
    wrong = []
    for rows in (10, 100, 1000):
        hot = np.eye(3, dtype=np.float32)[np.arange(rows) % 3]
        found = ensembles.temperature(ONE, hot.astype(np.float64), hot)
        assert ensembles.COLDEST * 1.5 < found < 1
        wrong.append(1 - ONE.values(hot / found)[0].max())
    for rows, chance in zip((10, 100, 1000), wrong, strict=True):
        assert chance == pytest.approx(2 * 2 / 3 / (rows + 2), rel=0.01)  # two blind rows, wrong two times in three


def test_numbers_claim_no_confidence() -> None:
    assert ensembles.temperature(NUMBER, np.ones((5, 1)), np.zeros((5, 1), dtype=np.float32)) == 1.0


def test_each_fold_is_judged_by_the_others() -> None:
    fold = np.array(["0", "1", "2", "10", "1", "0", "2"])
    rows = np.arange(7.0)
    found = ensembles.cross_fitted(
        fold,
        lambda mask: set(rows[mask].tolist()),
        lambda seen, mask: np.array([[each, each in seen, len(seen)] for each in rows[mask]], dtype=np.float64),
    )
    np.testing.assert_array_equal(found[:, 0], rows)
    assert not found[:, 1].any()
    np.testing.assert_array_equal(found[:, 2], [7 - (fold == each).sum() for each in fold])


def test_one_fold_leaves_nothing_to_fit_on() -> None:
    with pytest.raises(ValueError, match="two folds"):
        ensembles.cross_fitted(np.zeros(4), lambda mask: None, lambda _, mask: np.zeros((4, 1)))
