"""Losses of a reference model on every supervised token of the training rows, read from files on disk."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from workbench.data.batching import Indices
from workbench.training.row_losses import Floats32

PART = 2**20
"""Tokens after which a part is full: 4 MiB."""


def parts(count_N: Indices) -> list[tuple[int, int]]:
    """First row of each part, and the one after its last.

    Args:
        count_N: Supervised tokens of each row.
    """
    part_N = (np.cumsum(count_N) - 1) // PART
    starts = [0, *(np.flatnonzero(np.diff(part_N)) + 1).tolist(), len(count_N)]
    return list(pairwise(starts))


def path(folder: Path, part: int) -> Path:
    """File of a part."""
    return folder / f"{part:05d}.npy"


class ReferenceLosses:
    """Losses by the number of a row, memory-mapped.

    Args:
        folder: Holds all parts.
        count_N: Supervised tokens of each row.
    """

    def __init__(self, folder: Path, count_N: Indices) -> None:
        self._folder, self._counts = folder, count_N

    def __getitem__(self, row: int) -> Floats32:
        """Losses of the supervised tokens of a row, in nats, in their order."""
        part = int(np.searchsorted(self._firsts, row, side="right")) - 1
        start = self._ends[row] - self._counts[row] - (self._ends[self._firsts[part] - 1] if part else 0)
        losses: Floats32 = np.asarray(self._parts[part][start : start + self._counts[row]])
        return losses

    @cached_property
    def _ends(self) -> Indices:
        ends: Indices = np.cumsum(self._counts)
        return ends

    @cached_property
    def _firsts(self) -> Indices:
        return np.asarray([first for first, _ in parts(self._counts)])

    @cached_property
    def _parts(self) -> Sequence[npt.NDArray[np.float32]]:
        return [np.load(path(self._folder, part), mmap_mode="r") for part in range(len(self._firsts))]
