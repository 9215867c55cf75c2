"""Global batches that depend on (rows, seed, step) alone, and the micro-batches that they are computed in.

Legend: B rows of a micro-batch, L padded length, N supervised positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class MicroBatch:
    """Rows of similar length, padded on the right.

    Attributes:
        input_ids_BL: int64. Padding repeats token 0, which no supervised position can see.
        positions_N: Flat indices into B * L of the positions whose next token is supervised.
        labels_N: Those next tokens.
        tokens: Tokens without padding.
    """

    input_ids_BL: Tensor
    positions_N: Tensor
    labels_N: Tensor
    tokens: int

    def to(self, device: torch.device) -> MicroBatch:
        """The same on `device`."""
        return replace(
            self,
            input_ids_BL=self.input_ids_BL.to(device, non_blocking=True),
            positions_N=self.positions_N.to(device, non_blocking=True),
            labels_N=self.labels_N.to(device, non_blocking=True),
        )


def steps_per_epoch(rows: int, size: int) -> int:
    """Optimizer steps in one pass; the last batch of an epoch may be smaller."""
    return math.ceil(rows / size)


def global_batch(step: int, *, rows: int, size: int, seed: int) -> Indices:
    """Row indices of optimizer step `step` (from 0): a slice of the epoch's seeded permutation."""
    epoch, index = divmod(step, steps_per_epoch(rows, size))
    return _permutation(rows, seed, epoch)[index * size : (index + 1) * size]


def micro_batches(indices: Indices, lengths: Indices, *, tokens: int) -> Iterator[Indices]:
    """`indices` cut so that rows x longest row <= `tokens`, longest first, which decides memory at once.

    A row that is longer than `tokens` comes alone.
    """
    order = indices[np.lexsort((indices, -lengths[indices]))]
    start = 0
    while start < len(order):
        count = max(1, tokens // int(lengths[order[start]]))
        yield order[start : start + count]
        start += count


def collate(rows: Sequence[tuple[Indices, npt.NDArray[np.bool_]]]) -> MicroBatch:
    """Pad rows of (token ids, supervised) into a micro-batch."""
    longest = max(len(ids) for ids, _ in rows)
    input_ids = np.zeros((len(rows), longest), dtype=np.int64)
    target = np.zeros((len(rows), longest), dtype=bool)
    for number, (ids, supervised) in enumerate(rows):
        input_ids[number, : len(ids)] = ids
        target[number, : len(ids)] = supervised
    # The hidden state at position t predicts token t + 1; the first token of a row has nothing to predict it.
    positions = np.flatnonzero(target[:, 1:])
    row, column = np.divmod(positions, longest - 1) if longest > 1 else (positions, positions)
    return MicroBatch(
        input_ids_BL=torch.from_numpy(input_ids),
        positions_N=torch.from_numpy(row * longest + column),
        labels_N=torch.from_numpy(input_ids[row, column + 1]),
        tokens=sum(len(ids) for ids, _ in rows),
    )


@lru_cache(maxsize=2)
def _permutation(rows: int, seed: int, epoch: int) -> Indices:
    return np.random.default_rng([seed, epoch]).permutation(rows)
