"""Global batches, which depend only on (rows, seed, step), and the micro-batches in which they are computed.

Legend: B rows of a micro-batch, L padded length, N supervised positions.

A row of an encoder-decoder holds the encoder's tokens, followed by the decoder's tokens from its start token on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Indices = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Weights = npt.NDArray[np.int64] | Floats
ScalarT = TypeVar("ScalarT", bound=np.generic)

PASS_OVERHEAD = 100
"""Fixed cost of a forward and backward pass, in tokens; a tenth of the largest micro-batch where that is more, as on
accelerators. LoRA on 6 M parameters, one core of a Xeon: some 30 ms, where a token takes 0.25 ms
(scripts/bench/solver.py, steps in few and in many micro-batches).
"""


class Row(NamedTuple):
    """One example: token ids (L,) and which of them carry loss (L,)."""

    input_ids: Indices
    supervised: npt.NDArray[np.bool_]
    source: int = 0  # number of first tokens that an encoder reads; 0 without a separate decoder
    digest: int = 0  # hash of the row's content, by which random masks know it wherever it stands
    pictures: str = ""  # names the file of its pictures, as their processor keeps them; empty where it has none


ON_HOST = ("row_lengths", "row_owners", "prefix_tokens")
"""Inputs that say how many tokens the next operations have, and that an accelerator would be waited for to read."""


@dataclass(frozen=True)
class MicroBatch:
    """Rows of similar length, padded on the right, or packed as `workbench.data.packing` does.

    Attributes:
        inputs: Arguments of the model. Padding is token 0; it comes after every prediction of a causal model or a
            decoder, and is masked for an encoder.
        positions_N: Flat indices into B * L of the last hidden states whose token is predicted.
        labels_N: The predicted tokens; for classification a row's weight and targets, (N, 1 + C) float32.
        tokens: Number of tokens without padding.
        lengths_B: Tokens of each row without padding (the decoder's, if any); None where there is an attention mask.
            Packed rows have theirs among the inputs, as `row_lengths` on the host, and as `row_starts`: the place of
            each row's first token and that of the end, (B + 1,) int32.
        rows_B: Numbers of the examples in their data set.
        sequences: Rows of each example, one after another: the two answers of a pair.
    """

    inputs: dict[str, Tensor]
    positions_N: Tensor
    labels_N: Tensor
    tokens: int
    lengths_B: Tensor | None = None
    rows_B: Indices | None = None
    weights_N: Tensor | None = None
    """Factor of the loss of each label (N,), for tokens; None: 1. float32."""
    sequences: int = 1
    row_tokens: Indices | None = None
    """Tokens of each row (B,) where an example has several."""
    row_N: Tensor | None = None
    """The row of each label (N,) int64 where its place does not tell, as several rows share their first tokens."""
    filler: int = 0
    """Tokens after the last row, of packed rows that nobody looks at."""

    @property
    def row_of_label(self) -> Tensor:
        """The row of each label (N,), counted in the batch."""
        import torch

        if self.row_N is not None:
            return self.row_N
        if self.labels_N.ndim > 1:  # weight and targets of a row
            return torch.arange(len(self.labels_N))
        if "row_lengths" in self.inputs:  # packed
            return torch.searchsorted(self.inputs["row_starts"][1:].long(), self.positions_N, right=True)
        return self.positions_N // self.width

    @property
    def rows(self) -> int:
        """Number of rows, B."""
        return len(next(iter(self.inputs.values()))) if self.rows_B is None else len(self.rows_B) * self.sequences

    @property
    def width(self) -> int:
        """Padded tokens of each row of text, L; of a decoder where there is one."""
        return self.inputs["decoder_input_ids" if "decoder_input_ids" in self.inputs else "input_ids"].shape[1]

    def numbered(self, indices: Indices, lengths: Indices) -> tuple[Indices, Indices | None]:
        """Numbers of the rows for what draws by row, and their tokens where they are known. `indices`: the examples of
        the batch. `lengths`: tokens of every example."""
        if self.filler:
            return np.append(indices, -1), np.append(lengths[indices], self.filler)
        if self.sequences == 1:
            return indices, lengths[indices]
        rows: Indices = (indices[:, None] * self.sequences + np.arange(self.sequences)).ravel()
        return rows, self.row_tokens

    def weighted(self, weight_B: npt.NDArray[np.float64]) -> MicroBatch:
        """The same rows with the loss of each row multiplied by its weight."""
        import torch

        weight_N = torch.from_numpy(weight_B).float()[self.row_of_label.cpu()].to(self.labels_N.device)
        if self.labels_N.ndim == 1:
            return self.with_factors(weight_N)
        labels_N = self.labels_N.clone()
        labels_N[:, 0] *= weight_N
        return replace(self, labels_N=labels_N)

    def with_factors(self, factor_N: Tensor) -> MicroBatch:
        """The same rows with the loss of each token multiplied by its factor."""
        factor_N = factor_N.to(self.labels_N.device)
        return replace(self, weights_N=factor_N if self.weights_N is None else self.weights_N * factor_N)

    def twice(self) -> MicroBatch:
        """The same padded rows and, after them, once more: two passes over them in one."""
        import torch

        ids_BL = self.inputs.get("decoder_input_ids", self.inputs.get("input_ids"))
        places = 0 if ids_BL is None else ids_BL.numel()  # pictures have one place each, which nobody looks up
        doubled = self._moved(lambda tensor: torch.cat([tensor, tensor]))
        return replace(doubled, positions_N=torch.cat([self.positions_N, self.positions_N + places]))

    def to(self, device: torch.device) -> MicroBatch:
        """Copy to `device`."""
        return self._moved(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> MicroBatch:
        """Copy to pinned memory, from which an accelerator copies while it computes."""
        from torch import Tensor

        return self._moved(Tensor.pin_memory)

    def _moved(self, move: Callable[[Tensor], Tensor]) -> MicroBatch:
        return replace(
            self,
            inputs={name: tensor if name in ON_HOST else move(tensor) for name, tensor in self.inputs.items()},
            positions_N=move(self.positions_N),
            labels_N=move(self.labels_N),
            lengths_B=None if self.lengths_B is None else move(self.lengths_B),
            weights_N=None if self.weights_N is None else move(self.weights_N),
            row_N=None if self.row_N is None else move(self.row_N),
        )


class Collate(Protocol):
    """Pads rows as they are in pass `epoch` over the data."""

    def __call__(self, rows: Sequence[Row], *, epoch: int) -> MicroBatch: ...


class Examples(Protocol):
    """Training examples: a finite list of known length."""

    @property
    def lengths(self) -> Indices:
        """Tokens of each example."""

    @property
    def supervised(self) -> Weights:
        """Weight of each example in the mean loss: its number of predicted tokens, or the weight of its label."""

    @property
    def difficulty(self) -> Floats | None:
        """How hard each example is, higher is harder; None where it is not known."""

    def __len__(self) -> int:
        """Number of draws in one pass over the data; the number of examples, where each is drawn once."""

    def sample(self, draws: Indices, *, epoch: int) -> Indices:
        """Example of each draw of pass `epoch`; draw i takes example i unless the data are resampled."""

    def place(self, index: int) -> str:
        """File and row of example `index`."""

    def seen(self, *, epoch: int, step: int, steps: int | None = None) -> Self:
        """The same examples as step `step`, in pass `epoch`, reads them: rewritten or cut, with their lengths then.
        `step`: from 0. `steps`: optimizer steps of the run; None where a budget alone ends it."""

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        """The examples `indices`, padded, as they are in pass `epoch` over the data."""


class WholeRows:
    """Base of rows that a pass samples once each, whole and the same in every step, without a difficulty."""

    @property
    def difficulty(self) -> Floats | None:
        return None

    def sample(self, draws: Indices, *, epoch: int) -> Indices:
        """Each draw takes the row of its number."""
        return draws

    def seen(self, *, epoch: int, step: int, steps: int | None = None) -> Self:
        """The same in every step."""
        return self


def steps_per_epoch(rows: int, size: int) -> int:
    """Optimizer steps in one pass; the last batch of an epoch may be smaller."""
    return math.ceil(rows / size)


def global_batch(step: int, *, rows: int, size: int, seed: int) -> Indices:
    """Row indices of optimizer step `step`: a slice of the epoch's seeded permutation.

    Args:
        step: From 0; beyond the last one of an epoch, the next one begins.
        rows: In the data set.
        size: Rows of a batch; the last one of an epoch may be smaller.
        seed: The order of the rows depends on it.

    Returns:
        Row numbers (size,).

    Examples:
        >>> import workbench
        >>> batches = [workbench.global_batch(step, rows=5, size=2, seed=0) for step in range(3)]
        >>> sorted(int(row) for batch in batches for row in batch)
        [0, 1, 2, 3, 4]
    """
    epoch, index = divmod(step, steps_per_epoch(rows, size))
    return _permutation(rows, seed, epoch)[index * size : (index + 1) * size]


def evenly_spaced(rows: int, count: int) -> Indices:
    """Numbers of at most `count` of `rows` rows, evenly spaced from the first to the last."""
    return np.unique(np.linspace(0, rows - 1, num=min(count, rows), dtype=np.int64))


def first_rows(train: Examples, *, seed: int, count: int = 64) -> Iterator[dict[str, Tensor]]:
    """Yield model inputs of the first `count` rows of training, one row at a time and so without padding."""
    for row in global_batch(0, rows=len(train), size=count, seed=seed):
        yield train.batch(row[None]).inputs


def micro_batches(indices: Indices, lengths: Indices, *, tokens: int) -> Iterator[Indices]:
    """Split `indices` so that rows x longest row <= `tokens`, longest first: a lack of memory shows at once.

    Of all such splits it is the one of least computation, padding included (dynamic programming over the sorted rows).
    A row longer than `tokens` has a micro-batch of its own.

    Args:
        indices: Rows of a global batch.
        lengths: Tokens of every row of the data set.
        tokens: In one forward pass, padding included.

    Returns:
        Row numbers of each micro-batch, which `batch` of the rows pads.

    Examples:
        >>> import numpy, workbench
        >>> lengths = numpy.array([10, 300, 12, 290, 11])
        >>> [part.tolist() for part in workbench.micro_batches(numpy.arange(5), lengths, tokens=600)]
        [[1, 3], [2, 4, 0]]
    """
    order = indices[np.lexsort((indices, -lengths[indices]))]
    overhead = max(PASS_OVERHEAD, tokens // 10)
    min_cost = np.append(0.0, np.full(len(order), np.inf))  # of the first n rows
    last_start = np.zeros(len(order) + 1, dtype=np.int64)  # of the last micro-batch of the first n rows
    for first, length in enumerate(lengths[order]):
        rows = np.arange(1, 1 + min(max(1, tokens // int(length)), len(order) - first))
        cost = min_cost[first] + overhead + rows * length
        better = rows[cost <= min_cost[first + rows]]
        min_cost[first + better], last_start[first + better] = cost[better - 1], first
    cuts = [len(order)]
    while cuts[-1]:
        cuts.append(int(last_start[cuts[-1]]))
    for first, last in itertools.pairwise(reversed(cuts)):
        yield order[first:last]


def collate(rows: Sequence[Row], *, epoch: int = 0) -> MicroBatch:
    """Pad rows to a micro-batch; each supervised token is predicted from those before it, the same in any epoch."""
    import torch

    ids_BL = padded([row.input_ids[row.source :] for row in rows])
    target_BL = padded([row.supervised[row.source :] for row in rows])
    # The hidden state at position t predicts token t + 1, so the first token of a row is never predicted.
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
    """Token ids and attention mask (B, L) for an encoder."""
    import torch

    mask_BL = padded([np.ones_like(row) for row in rows])
    return {"input_ids": torch.from_numpy(padded(rows)), "attention_mask": torch.from_numpy(mask_BL)}


def padded(rows: Sequence[npt.NDArray[ScalarT]]) -> npt.NDArray[ScalarT]:
    """Rows of different lengths as one array (B, L), padded with zeros on the right."""
    result = np.zeros((len(rows), max(map(len, rows))), dtype=rows[0].dtype)
    for number, row in enumerate(rows):
        result[number, : len(row)] = row
    return result


@lru_cache(maxsize=2)
def _permutation(rows: int, seed: int, epoch: int) -> Indices:
    return np.random.default_rng([seed, epoch]).permutation(rows)
