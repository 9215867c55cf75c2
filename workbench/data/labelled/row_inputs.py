"""Inputs of a model for rows: the part of a labelled set that differs between texts and pictures.

Legend: B rows of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor
from typing_extensions import Self

from workbench.data.batching import Indices


class Mix(NamedTuple):
    """Rows that were mixed with others, as mixup and CutMix do."""

    partner_B: Indices
    """The other row of each, by its number in the set."""
    share_B: npt.NDArray[np.float64]
    """Share of the row's own label; the rest is its partner's."""


class ModelInputs(NamedTuple):
    """Rows as a model reads them together."""

    inputs: dict[str, Tensor]
    """Arguments of the model."""
    positions_B: Tensor
    """Flat index of each row's last real token among all of the micro-batch."""
    tokens: int
    """Tokens or patches without padding."""
    mix: Mix | None = None


class RowInputs(Protocol):
    """Rows in the form that a backbone reads, without their labels."""

    @property
    def lengths(self) -> Indices:
        """Tokens or patches of each row."""

    @property
    def truncated(self) -> int:
        """Number of rows that lost a part."""

    @property
    def redrawn(self) -> bool:
        """Whether a row that an epoch draws again is read in another way."""

    def batch(self, indices: Indices, *, epoch: int | None, repeats: Indices | None = None) -> ModelInputs:
        """The rows `indices`, padded.

        Args:
            epoch: Pass over the training rows, which decides how each is augmented; None: as they are.
            repeats: How often the epoch has drawn each of them before (B,); None: never.
        """

    def rewritten(self, *, epoch: int, progress: float) -> Self:
        """The rows as a step of pass `epoch` reads them, after a share of the run, where that changes their lengths."""

    def take(self, indices: Indices) -> Self:
        """The rows `indices`."""

    def concatenated(self, other: Self) -> Self:
        """These rows, followed by those of `other`."""

    def arrays(self) -> Iterator[npt.NDArray[Any]]:
        """All arrays that the rows consist of, by which sets are told apart."""

    def differ(self, other: Self) -> npt.NDArray[np.bool_]:
        """Which rows (N,) are not the same in `other`."""
