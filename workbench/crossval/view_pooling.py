"""Several predictions of a row as one: a mean with the weights that make its loss lowest, or a vote.

Legend: V predictions of the same rows, N rows, C outputs (classes, or 1 for a number), K cells that tell.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from scipy import optimize

from workbench.config.sections.classes_config import Kind
from workbench.data.labelled.labels import Floats, Labels
from workbench.evaluation.target_scores import OneHot

Loss: TypeAlias = Callable[[Floats], tuple[float, Floats]]
"""Weights (V,) to the mean loss and its gradient (V,)."""

LEAST_WEIGHT = 1e-3
"""A prediction that would weigh less is left out."""
_TINY = 1e-12


def learned(labels: Labels, values_VNC: Floats, targets_NC: OneHot) -> Floats:
    """Weights (V,), none below 0, sum 1, whose mean has the lowest loss on these rows; the loss is convex in them.

    Args:
        labels: Their kind.
        values_VNC: Probabilities, or numbers in their unit.
        targets_NC: What Labels.targets gives.
    """
    loss = (_squared if labels.kind == "number" else _logarithmic)(labels, values_VNC, targets_NC)
    count = len(values_VNC)
    optimum = optimize.minimize(
        loss,
        np.full(count, 1 / count),
        jac=True,
        method="SLSQP",
        bounds=[(0.0, 1.0)] * count,
        constraints={"type": "eq", "fun": lambda weights_V: weights_V.sum() - 1, "jac": np.ones_like},
        options={"ftol": 1e-10, "maxiter": 500},
    )
    weights_V: Floats = np.where(optimum.x < LEAST_WEIGHT, 0.0, optimum.x)
    weights_V /= weights_V.sum()
    return weights_V


def vote(kind: Kind, values_VNC: Floats) -> Floats:
    """Shares of votes (N, C): each prediction votes for its class, and their mean has one vote, which it divides.

    The class with most votes is the likeliest one; the vote of the mean breaks ties, and leaves no probability at 0,
    whose loss would be infinite.

    Args:
        kind: Kind of the labels, not numbers. Where several classes hold, there is a vote on each of them.
        values_VNC: Probabilities.
    """
    if kind == "several":
        # Half a vote for each side where a probability is exactly one half.
        votes_VNC = (np.sign(values_VNC - 0.5) + 1) / 2
    else:
        votes_VNC = (values_VNC == values_VNC.max(2, keepdims=True)).astype(np.float64)
        votes_VNC /= votes_VNC.sum(2, keepdims=True)
    shares_NC: Floats = (votes_VNC.sum(0) + values_VNC.mean(0)) / (len(values_VNC) + 1)
    return shares_NC


def _squared(labels: Labels, values_VNC: Floats, targets_NC: OneHot) -> Loss:
    said_VN = (values_VNC[:, :, 0] - labels.mean) / labels.scale

    def loss(weights_V: Floats) -> tuple[float, Floats]:
        error_N = weights_V @ said_VN - targets_NC[:, 0]
        return float((error_N**2).mean()), 2 * said_VN @ error_N / len(error_N)

    return loss


def _logarithmic(labels: Labels, values_VNC: Floats, targets_NC: OneHot) -> Loss:
    """Logarithmic loss of the true classes; with several classes, also of the absence of the others."""
    true_NC = targets_NC > 0
    p_VK, share_K = values_VNC[:, true_NC], targets_NC[true_NC].astype(np.float64)
    if labels.kind == "several":
        absent_NC = targets_NC < 1
        p_VK = np.concatenate([p_VK, 1 - values_VNC[:, absent_NC]], axis=1)
        share_K = np.concatenate([share_K, 1 - targets_NC[absent_NC]])
    p_VK = np.maximum(p_VK, _TINY)

    def loss(weights_V: Floats) -> tuple[float, Floats]:
        mean_K = weights_V @ p_VK
        return float(-(share_K * np.log(mean_K)).sum() / len(targets_NC)), -p_VK @ (share_K / mean_K) / len(targets_NC)

    return loss
