"""Learned weights are on the simplex, and no other weights have a lower loss; votes are counted."""

from __future__ import annotations

import numpy as np
import pytest

from tests.workbench.crossval.seeing import NUMBER, ONE, SEVERAL, said
from workbench.crossval import gains
from workbench.crossval.tta import learned, vote
from workbench.data.labelled.labels import Labels


@pytest.mark.parametrize("labels", [ONE, SEVERAL, NUMBER], ids=lambda labels: labels.kind)
def test_no_other_weights_are_better(labels: Labels) -> None:
    values, targets = said(labels, [1.0, 1.5, 2.5])
    found = learned(labels, values, targets)
    assert found.min() >= 0 and found.sum() == pytest.approx(1)

    def loss(weights: np.ndarray) -> float:
        return float(gains.row_losses(labels, np.einsum("v,vnc->nc", weights, values), targets).mean())

    steps = np.arange(0, 1.01, 0.05)
    grid = [loss(np.array([a, b, 1 - a - b])) for a in steps for b in steps if a + b <= 1]
    assert loss(found) <= min(grid) + 1e-6
    assert found[0] > found[1] > found[2]


def test_certainty_that_is_wrong_has_a_finite_loss() -> None:
    targets = np.eye(2, dtype=np.float32)[[0, 1, 0, 1]]
    wrong = np.eye(2)[[1, 0, 1, 0]]
    assert learned(Labels("one", ("a", "b")), np.stack([wrong, wrong]), targets) == pytest.approx([0.5, 0.5])
    assert learned(Labels("one", ("a", "b")), np.stack([wrong, np.full((4, 2), 0.5)]), targets)[1] == 1


def test_the_class_with_most_votes_is_the_likeliest() -> None:
    values = np.random.default_rng(0).dirichlet(np.full(4, 0.3), size=(7, 300))
    found = vote("one", values)
    votes = np.stack([np.bincount(row, minlength=4) for row in values.argmax(2).T])
    assert found == pytest.approx((votes + values.mean(0)) / 8)
    assert found.sum(1) == pytest.approx(np.ones(300)) and found.min() > 0
    assert (votes[np.arange(300), found.argmax(1)] == votes.max(1)).all()


def test_the_mean_breaks_ties_of_votes() -> None:
    values = np.array([[[0.6, 0.4]], [[0.1, 0.9]]])
    assert vote("one", values) == pytest.approx(np.array([[1.35, 1.65]]) / 3)


def test_the_order_of_classes_does_not_matter_where_a_view_is_undecided() -> None:
    values = np.array([[[0.4, 0.4, 0.2]], [[0.2, 0.4, 0.4]]])
    assert vote("one", values[:, :, ::-1]) == pytest.approx(vote("one", values)[:, ::-1])


def test_several_classes_are_voted_on_one_by_one() -> None:
    values = np.array([[[0.9, 0.5, 0.2]], [[0.6, 0.5, 0.4]], [[0.2, 0.5, 0.1]]])
    votes = np.array([[2, 1.5, 0]])
    assert vote("several", values) == pytest.approx((votes + values.mean(0)) / 4)
