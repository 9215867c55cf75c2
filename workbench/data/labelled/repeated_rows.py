"""Labelled rows that an epoch draws several times, each time with a number of its own where it is read in another way.

Legend: N rows, M draws of an epoch, B rows of a micro-batch.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from workbench.data import resampling
from workbench.data.batching import Indices, MicroBatch, Weights
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.data.resampling import DealtRows


@dataclass(frozen=True, eq=False)
class RepeatedRows(DealtRows[LabelledSet]):
    """Rows of which number `row + repeat * N` is a row that its epoch has drawn `repeat` times before.

    Where it is read in the same way at each draw, as a text is, its number is always `row`.
    """

    @property
    @abstractmethod
    def most_draws(self) -> int:
        """Times that an epoch draws a row at most."""

    @property
    def lengths(self) -> Indices:
        """Tokens or patches of each number."""
        return np.tile(self.rows.lengths, self._times)

    @property
    def supervised(self) -> Weights:
        """Weight of each number."""
        weights: Weights = np.concatenate([self.rows.supervised] * self._times)
        return weights

    def row_of(self, numbers: Indices) -> Indices:
        """The row of each number."""
        row_numbers: Indices = numbers % len(self.rows)
        return row_numbers

    def place(self, index: int) -> str:
        """File and row of a number."""
        return self.rows.place(index % len(self.rows))

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        """The rows of these numbers, padded."""
        return self.rows.batch(self.row_of(indices), epoch=epoch, repeats=indices // len(self.rows))

    def numbers(self, row_M: Indices, *, seed: int, epoch: int) -> Indices:
        """The number of each draw of an epoch, of its row and of the draws of the row in earlier steps.

        Args:
            row_M: The row of each draw, of 0 to M - 1.
            seed: Of the run, by which draws are dealt to steps.
        """
        if not self.rows.inputs.redrawn:
            return row_M
        return resampling.numbered(row_M, rows=len(self.rows), seed=seed, epoch=epoch)

    @property
    def _times(self) -> int:
        return self.most_draws if self.rows.inputs.redrawn else 1
