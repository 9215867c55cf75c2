"""Global batches that depend on (rows, seed, step) alone, and the micro-batches that they are computed in.

Legend: B rows of a micro-batch, L padded length, N supervised positions.

What an encoder reads and what is predicted stand in one row: an encoder-decoder's row is its source, then its decoder's
tokens from the start token on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Indices = npt.NDArray[np.int64]
Weights = npt.NDArray[np.int64] | npt.NDArray[np.float64]
ScalarT = TypeVar("ScalarT", bound=np.generic)

PASS = 100
"""What a forward and a backward pass take besides their tokens, as so many tokens; a tenth of the most tokens of one
where that is more, as on accelerators. LoRA on 6 M parameters, one core of a Xeon: some 30 ms, where a token takes 0.25
(scripts/bench/solver.py, steps in few and in many micro-batches).
"""


class Row(NamedTuple):
    """One example: token ids (L,) and which of them carry loss (L,)."""

    input_ids: Indices
    supervised: npt.NDArray[np.bool_]
    source: int = 0
    """How many of the first tokens an encoder reads; 0 where there is no decoder beside it."""
    number: int = 0
    """Which row of its table it is."""


@dataclass(frozen=True)
class MicroBatch:
    """Rows of similar length, padded on the right.

    Attributes:
        inputs: What the model is called with. Padding repeats token 0, which nothing looks at: what a causal model or a
            decoder predicts stands before it, and an encoder's is masked.
        positions_N: Flat indices into B * L of the last hidden states whose token is predicted.
        labels_N: Those tokens; for classification a row's weight and targets, (N, 1 + C) float32.
        tokens: Tokens without padding.
        lengths_B: Real tokens of each row, of a decoder's where there is one; None where an attention mask says it.
        rows_B: Which examples they are, by their number in the set.
    """

    inputs: dict[str, Tensor]
    positions_N: Tensor
    labels_N: Tensor
    tokens: int
    lengths_B: Tensor | None = None
    rows_B: Indices | None = None

    def to(self, device: torch.device) -> MicroBatch:
        """The same on `device`."""
        return replace(
            self,
            inputs={name: tensor.to(device, non_blocking=True) for name, tensor in self.inputs.items()},
            positions_N=self.positions_N.to(device, non_blocking=True),
            labels_N=self.labels_N.to(device, non_blocking=True),
            lengths_B=None if self.lengths_B is None else self.lengths_B.to(device, non_blocking=True),
        )

    def pinned(self) -> MicroBatch:
        """The same in memory from which an accelerator copies while it computes."""
        return replace(
            self,
            inputs={name: tensor.pin_memory() for name, tensor in self.inputs.items()},
            positions_N=self.positions_N.pin_memory(),
            labels_N=self.labels_N.pin_memory(),
            lengths_B=None if self.lengths_B is None else self.lengths_B.pin_memory(),
        )


class Collate(Protocol):
    """How rows are seen in pass `epoch` over the data."""

    def __call__(self, rows: Sequence[Row], *, epoch: int) -> MicroBatch: ...


class Examples(Protocol):
    """Training examples: a finite list of known length."""

    @property
    def lengths(self) -> Indices:
        """Tokens of each example."""

    @property
    def supervised(self) -> Weights:
        """How much each example weighs in the mean loss: its predicted tokens, or the weight of its label."""

    def __len__(self) -> int:
        """Draws in one pass over the data: the number of examples, where each is drawn once."""

    def drawn(self, draws: Indices, *, epoch: int) -> Indices:
        """The examples that some draws of pass `epoch` take; most data give each draw the example of its number."""

    def place(self, index: int) -> str:
        """File and row that example `index` came from."""

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        """The examples `indices`, padded, as they are seen in pass `epoch` over the data."""


def steps_per_epoch(rows: int, size: int) -> int:
    """Optimizer steps in one pass; the last batch of an epoch may be smaller."""
    return math.ceil(rows / size)


def global_batch(step: int, *, rows: int, size: int, seed: int) -> Indices:
    """Row indices of optimizer step `step` (from 0): a slice of the epoch's seeded permutation."""
    epoch, index = divmod(step, steps_per_epoch(rows, size))
    return _permutation(rows, seed, epoch)[index * size : (index + 1) * size]


def first_rows(train: Examples, *, seed: int, count: int = 64) -> Iterator[dict[str, Tensor]]:
    """Model inputs of the `count` rows that training begins with, one row at a time, so without padding."""
    for row in global_batch(0, rows=len(train), size=count, seed=seed):
        yield train.batch(row[None]).inputs


def micro_batches(indices: Indices, lengths: Indices, *, tokens: int) -> Iterator[Indices]:
    """`indices` cut so that rows x longest row <= `tokens`, longest first, which decides memory at once.

    Of all such cuts it is the one that computes least, padding included. A row longer than `tokens` comes alone.
    """
    order = indices[np.lexsort((indices, -lengths[indices]))]
    overhead = max(PASS, tokens // 10)
    least = np.append(0.0, np.full(len(order), np.inf))  # that the first rows take, by their number
    begins = np.zeros(len(order) + 1, dtype=np.int64)  # where the last micro-batch of these begins
    for first, length in enumerate(lengths[order]):
        rows = np.arange(1, 1 + min(max(1, tokens // int(length)), len(order) - first))
        found = least[first] + overhead + rows * length
        better = rows[found <= least[first + rows]]
        least[first + better], begins[first + better] = found[better - 1], first
    cuts = [len(order)]
    while cuts[-1]:
        cuts.append(int(begins[cuts[-1]]))
    for first, last in itertools.pairwise(reversed(cuts)):
        yield order[first:last]


def collate(rows: Sequence[Row], *, epoch: int = 0) -> MicroBatch:
    """Pad rows into a micro-batch in which each supervised token is predicted from those before it, in any epoch."""
    ids_BL = padded([row.input_ids[row.source :] for row in rows])
    target_BL = padded([row.supervised[row.source :] for row in rows])
    # The hidden state at position t predicts token t + 1; the first token of a row has nothing to predict it.
    number, column = np.nonzero(target_BL[:, 1:])
    inputs = {"input_ids": torch.from_numpy(ids_BL)}
    if rows[0].source:
        inputs = encoder_inputs([row.input_ids[: row.source] for row in rows])
        inputs["decoder_input_ids"] = torch.from_numpy(ids_BL)
    return MicroBatch(
        inputs=inputs,
        positions_N=torch.from_numpy(number * ids_BL.shape[1] + column),
        labels_N=torch.from_numpy(ids_BL[number, column + 1]),
        tokens=sum(len(row.input_ids) for row in rows),
        lengths_B=torch.tensor([len(row.input_ids) - row.source for row in rows]),
    )


def encoder_inputs(rows: Sequence[Indices]) -> dict[str, Tensor]:
    """Token ids and attention mask (B, L) for an encoder, which would look at the padding."""
    mask_BL = padded([np.ones_like(row) for row in rows])
    return {"input_ids": torch.from_numpy(padded(rows)), "attention_mask": torch.from_numpy(mask_BL)}


def padded(rows: Sequence[npt.NDArray[ScalarT]]) -> npt.NDArray[ScalarT]:
    """Rows of unequal length as one array (B, L), with zeros on the right."""
    result = np.zeros((len(rows), max(map(len, rows))), dtype=rows[0].dtype)
    for number, row in enumerate(rows):
        result[number, : len(row)] = row
    return result


@lru_cache(maxsize=2)
def _permutation(rows: int, seed: int, epoch: int) -> Indices:
    return np.random.default_rng([seed, epoch]).permutation(rows)
