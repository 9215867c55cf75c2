"""Rows that an epoch may skip or repeat, and rows that count more or less in the loss.

A row of weight 2 counts as the same row twice in its global batch. The loss stays a mean: a sum with weights is divided
by the sum of the weights, so that weights which are all alike change nothing. Scores of held-out and test rows know
nothing of them.

Legend: N rows, M samples of an epoch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Generic, Self, TypeVar

import numpy as np

from workbench.data.batching import Examples, Floats, Indices, MicroBatch, Weights, global_batch
from workbench.data.rows import excerpt, finite
from workbench.errors import DataError

R = TypeVar("R", bound=Examples)


@dataclass(frozen=True, eq=False)
class ResampledRows(Generic[R]):
    """Rows around other rows; a subclass says with `len` and `sample` what an epoch samples, or how rows differ."""

    rows: R

    def __len__(self) -> int:
        return len(self.rows)

    def sample(self, draws: Indices, *, epoch: int) -> Indices:
        return self.rows.sample(draws, epoch=epoch)

    @property
    def lengths(self) -> Indices:
        return self.rows.lengths

    @property
    def supervised(self) -> Weights:
        return self.rows.supervised

    @property
    def difficulty(self) -> Floats | None:
        return self.rows.difficulty

    def place(self, index: int) -> str:
        return self.rows.place(index)

    def seen(self, *, epoch: int, step: int, steps: int | None = None) -> Self:
        rows = self.rows.seen(epoch=epoch, step=step, steps=steps)
        return self if rows is self.rows else replace(self, rows=rows)

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        return self.rows.batch(indices, epoch=epoch)


@dataclass(frozen=True, eq=False)
class DealtRows(ResampledRows[R], ABC):
    """Rows that an epoch samples by a table, made once for the epoch."""

    @abstractmethod
    def table(self, epoch: int) -> Indices:
        """The number that each draw of an epoch takes (M,)."""

    def sample(self, draws: Indices, *, epoch: int) -> Indices:
        """Numbers that some draws (of 0 to M - 1) of an epoch take."""
        taken: Indices = _table(self, epoch)[draws]
        return taken


@lru_cache(maxsize=4)
def _table(rows: DealtRows[Any], epoch: int) -> Indices:
    return rows.table(epoch)


def endless(members: Indices, *, first: int, count: int, seed: Sequence[int]) -> Indices:
    """`count` rows from draw `first` (of the whole run) on of an endless row of shuffled passes over `members`.

    A row comes again only when every other one has come as often. Each pass is a function of `seed` and its number.
    """
    passes, offset = divmod(first, len(members))
    needed = -(-(offset + count) // len(members))
    shuffled = [np.random.default_rng([*seed, passes + ahead]).permutation(members) for ahead in range(needed)]
    return np.concatenate([members[:0], *shuffled])[offset : offset + count]


def numbered(row_M: Indices, *, rows: int, seed: int, epoch: int) -> Indices:
    """A number for each draw of an epoch: `row + repeat * rows`, of a row that `repeat` earlier draws have taken.

    Args:
        row_M: The row of each draw, of 0 to M - 1.
        rows: N, of which draws take some.
        seed: Of the run, by which draws are dealt to steps.
    """
    order_M = global_batch(epoch, rows=len(row_M), size=len(row_M), seed=seed)
    # How often the row of each draw (M,) stands before it.
    drawn_M = row_M[order_M]
    order = np.argsort(drawn_M, kind="stable")
    _, first, count = np.unique(drawn_M[order], return_index=True, return_counts=True)
    found_M = np.empty_like(row_M)
    found_M[order] = np.arange(len(row_M)) - np.repeat(first, count)
    return row_M + rows * found_M[np.argsort(order_M)]


LEAST_WEIGHT, MOST_WEIGHT = 1e-6, 1e6  # weights between which sums in float32 are exact enough


def read_weight(value: Any, name: str) -> float:
    """Convert a cell of the column `name` to a weight; raises DataError where it is none."""
    weight = finite(value)
    if weight is None or not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
        raise DataError(
            f"`{name}` must be a number from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}, found {excerpt(value)}. "
            "Leave out rows that are not to count."
        )
    return weight


def effective_rows(weight_N: Weights) -> float:
    """Number of equal rows whose mean varies as much as that of these (Kish 1965)."""
    return float(weight_N.sum() ** 2 / (weight_N**2).sum())


def weights_in_words(weight_N: Weights) -> list[str]:
    """Sentence on weights that differ; none where all are alike."""
    if uniform(weight_N):
        return []
    return [
        f"Weights: a training row counts {weight_N.min():.3g} to {weight_N.max():.3g} times (mean "
        f"{weight_N.mean():.3g}), so that {len(weight_N):,} rows vary as {effective_rows(weight_N):,.0f} equal ones "
        "would; held-out and test rows count once each."
    ]


def uniform(weight_N: Weights) -> bool:
    """Whether all rows count alike, so that weights change nothing."""
    return bool((weight_N == weight_N[0]).all())


@dataclass(frozen=True, eq=False)
class WeightedRows(ResampledRows[Examples]):
    """Rows of tokens, each of which counts by its weight."""

    weight_N: Floats  # weight of each row

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
