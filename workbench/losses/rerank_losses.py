"""Losses of rerankers. All are sums over rows, in float32, to be divided by the rows of the global batch.

Legend: B rows, C candidates of a row: first the one that belongs to its query, then negatives.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def softmax(score_BC: Tensor, *, temperature: float) -> Tensor:
    """Cross-entropy of the first candidate among all of its row, in nats.

    ListNet's top-one loss with one relevant passage (Cao et al. 2007), which is InfoNCE over a list.
    """
    return -(score_BC / temperature).log_softmax(1)[:, 0].sum()


def binary(score_BC: Tensor) -> Tensor:
    """Binary cross-entropy of candidates, the mean over each row, in nats: the first belongs to the query."""
    wanted_BC = torch.zeros_like(score_BC)
    wanted_BC[:, 0] = 1
    return functional.binary_cross_entropy_with_logits(score_BC, wanted_BC, reduction="none").mean(1).sum()


def binary_of_scores(score_B: Tensor, wanted_B: Tensor) -> Tensor:
    """Binary cross-entropy of given scores from 0 to 1, in nats."""
    return functional.binary_cross_entropy_with_logits(score_B, wanted_B, reduction="sum")


def squared_error_of_scores(score_B: Tensor, wanted_B: Tensor) -> Tensor:
    """Squared distance from given scores."""
    return ((score_B - wanted_B) ** 2).sum()
