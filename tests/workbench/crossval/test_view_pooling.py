"""Learned weights are on the simplex, and no other weights have a lower loss."""

from __future__ import annotations

import numpy as np
import pytest

from tests.workbench.crossval.seeing import NUMBER, ONE, SEVERAL, said
from workbench.crossval import gains
from workbench.crossval.view_pooling import learned
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
