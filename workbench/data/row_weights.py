"""Weights of training rows, which a column of theirs gives: how often each counts in the loss.

A row of weight 2 counts as the same row twice in its global batch. The loss stays a mean: a sum with weights is divided
by the sum of the weights, so that weights which are all alike change nothing. Scores of held-out and test rows know
nothing of them.

Legend: N rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from workbench.data.batching import Examples, Indices, MicroBatch, Weights
from workbench.data.resampling import ResampledRows
from workbench.data.rows import excerpt, finite
from workbench.errors import DataError

Floats: TypeAlias = npt.NDArray[np.float64]

LEAST, MOST = 1e-6, 1e6
"""Weights between which sums in float32 are exact enough."""


def read(value: Any, name: str) -> float:
    """Convert a cell of the column `name` to a weight; raises DataError where it is none."""
    weight = finite(value)
    if weight is None or not LEAST <= weight <= MOST:
        raise DataError(
            f"`{name}` must be a number from {LEAST:g} to {MOST:g}, found {excerpt(value)}. "
            "Leave out rows that are not to count."
        )
    return weight


def effective(weight_N: Weights) -> float:
    """Number of equal rows whose mean varies as much as that of these (Kish 1965)."""
    return float(weight_N.sum() ** 2 / (weight_N**2).sum())


def in_words(weight_N: Weights) -> list[str]:
    """Sentence on weights that differ; none where all are alike."""
    if uniform(weight_N):
        return []
    return [
        f"Weights: a training row counts {weight_N.min():.3g} to {weight_N.max():.3g} times (mean "
        f"{weight_N.mean():.3g}), so that {len(weight_N):,} rows vary as {effective(weight_N):,.0f} equal ones would; "
        "held-out and test rows count once each."
    ]


def uniform(weight_N: Weights) -> bool:
    """Whether all rows count alike, so that weights change nothing."""
    return bool((weight_N == weight_N[0]).all())


@dataclass(frozen=True, eq=False)
class WeightedRows(ResampledRows[Examples]):
    """Rows of tokens of which each counts by its weight."""

    weight_N: Floats
    """Weight of each row."""

    def __len__(self) -> int:
        return len(self.rows)

    def sample(self, draws: Indices, *, epoch: int) -> Indices:
        """Rows that the draws of an epoch take: weights change none of it."""
        return self.rows.sample(draws, epoch=epoch)

    @property
    def supervised(self) -> Weights:
        """Predicted tokens of each row, times its weight."""
        return self.rows.supervised * self.weight_N

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        """The rows `indices`, padded, with a factor for each label."""
        return self.rows.batch(indices, epoch=epoch).weighted(self.weight_N[indices])


def weighted(rows: Examples, weight_N: Floats) -> Examples:
    """The rows with these weights; `rows` themselves where all count alike."""
    return rows if uniform(weight_N) else WeightedRows(rows, weight_N)
