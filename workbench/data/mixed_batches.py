"""Micro-batches that hold rows of several owners, such as the members of a bank.

Legend: B rows, L padded length, N labels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.data.arrangement import MASK, Arrangement
from workbench.data.batching import Indices, MicroBatch


class OwnerRows(NamedTuple):
    """Rows of one owner in a micro-batch."""

    owner: int
    indices: Indices
    counts: bool = True
    """Whether they carry loss."""


Cut = Callable[[Indices, Indices], Iterable[tuple[Indices, bool]]]
"""From numbers of rows and the tokens of each to those of each micro-batch, and whether they carry loss."""


def mixed_batches(
    batches: Sequence[Indices], lengths: Sequence[Indices], *, cut: Cut, padded: bool = True
) -> Iterator[list[OwnerRows]]:
    """The owners' batches together, cut like one batch into micro-batches.

    In a micro-batch the rows of an owner stand together, owners in order. Rows of like length meet whoever owns them,
    so that there is less padding than in micro-batches of one owner each.

    Args:
        batches: Row indices of each owner's global batch.
        lengths: Tokens of each owner's rows.
        padded: Whether rows can be padded; pictures cannot, and those of different sizes stay apart.
    """
    owners = np.repeat(np.arange(len(batches)), [len(batch) for batch in batches])
    rows = np.concatenate(batches)
    pooled = np.concatenate([length[batch] for batch, length in zip(batches, lengths, strict=True)])
    sizes = [np.arange(len(rows))] if padded else [np.flatnonzero(pooled == each) for each in np.unique(pooled)[::-1]]
    for chosen, counts in itertools.chain.from_iterable(cut(each, pooled) for each in sizes):
        own = owners[chosen]
        yield [OwnerRows(int(owner), rows[chosen[own == owner]], counts) for owner in np.unique(own)]


class JoinedRows(NamedTuple):
    """A micro-batch with the rows of several owners."""

    batch: MicroBatch
    labels: list[int]
    """Number of labels of each owner's rows."""
    numbered: list[tuple[Indices, Indices | None]]
    """See `MicroBatch.numbered`, of each owner's rows."""

    def pinned(self) -> JoinedRows:
        """The same in memory from which an accelerator copies while it computes."""
        return self._replace(batch=self.batch.pinned())


def join(batches: Sequence[MicroBatch]) -> MicroBatch:
    """One micro-batch with the rows of all, in their order, padded to the longest with zeros that nothing looks at."""
    counts = list(map(_rows, batches))
    length = max(map(padded_length, batches))
    starts = np.cumsum([0, *counts[:-1]])
    known = [batch.lengths_B for batch in batches if batch.lengths_B is not None] or None
    return MicroBatch(
        inputs={name: _padded([batch.inputs[name] for batch in batches]) for name in batches[0].inputs},
        positions_N=torch.cat(
            [_moved(batch, int(start), length) for batch, start in zip(batches, starts, strict=True)]
        ),
        labels_N=_labels(batches),
        tokens=sum(batch.tokens for batch in batches),
        lengths_B=None if known is None else torch.cat(known),
        sequences=batches[0].sequences,
    )


def laid_together(batches: Sequence[MicroBatch], arrangement: Arrangement) -> MicroBatch:
    """One micro-batch with the rows of all, in their order, laid out; packed ones know whose they are."""
    laid = arrangement.lay(join(batches))
    return _owned(laid, batches) if arrangement.packed else laid


def _owned(packed: MicroBatch, batches: Sequence[MicroBatch]) -> MicroBatch:
    counts = torch.tensor([_rows(batch) for batch in batches])
    owners_B = torch.repeat_interleave(torch.arange(len(batches)), counts)
    return replace(packed, inputs={**packed.inputs, "row_owners": owners_B})


def _rows(batch: MicroBatch) -> int:
    lengths_B = batch.inputs.get("row_lengths")
    return len(next(iter(batch.inputs.values())) if lengths_B is None else lengths_B)


def _labels(batches: Sequence[MicroBatch]) -> Tensor:
    """Labels (N, ...) of all; where those of some have fewer columns, with zeros behind that nothing looks at."""
    labels = [batch.labels_N for batch in batches]
    widest = max(each.shape[-1] for each in labels) if labels[0].ndim > 1 else 0
    narrow = labels[0].ndim > 1 and any(each.shape[-1] < widest for each in labels)
    return torch.cat([F.pad(each, (0, widest - each.shape[-1])) for each in labels] if narrow else labels)


def in_sequence(batches: Sequence[MicroBatch]) -> MicroBatch:
    """One micro-batch with the packed rows of all, in their order."""
    ends = np.cumsum([batch.width for batch in batches]).tolist()
    starts = [0, *ends[:-1]]
    inputs = {
        name: torch.cat([batch.inputs[name] for batch in batches], dim=1) for name in ("input_ids", "position_ids")
    }
    firsts = [batch.inputs["row_starts"][:-1] + start for batch, start in zip(batches, starts, strict=True)]
    packed = replace(
        batches[0],
        inputs={
            **inputs,
            MASK: batches[0].inputs[MASK],
            "row_lengths": torch.cat([batch.inputs["row_lengths"] for batch in batches]),
            "row_starts": torch.cat([*firsts, batches[-1].inputs["row_starts"][-1:] + starts[-1]]),
        },
        positions_N=torch.cat([batch.positions_N + start for batch, start in zip(batches, starts, strict=True)]),
        labels_N=torch.cat([batch.labels_N for batch in batches]),
        tokens=sum(batch.tokens for batch in batches),
        rows_B=None,
        weights_N=None,
    )
    return _owned(packed, batches)


def padded_length(batch: MicroBatch) -> int:
    """L, at whose positions something is predicted; all pictures of a micro-batch have the same number of patches."""
    for name in ("decoder_input_ids", "input_ids"):
        if name in batch.inputs:
            return batch.inputs[name].shape[1]
    return batch.tokens // len(batch.inputs["pixel_values"])


def _padded(tensors: Sequence[Tensor]) -> Tensor:
    if tensors[0].ndim > 2:  # pictures are of one size
        return torch.cat(list(tensors))
    longest = max(tensor.shape[1] for tensor in tensors)
    return torch.cat([F.pad(tensor, (0, longest - tensor.shape[1])) for tensor in tensors])


def _moved(batch: MicroBatch, start: int, length: int) -> Tensor:
    """Flat positions of a batch whose rows come `start` rows later, in rows of `length`."""
    own = padded_length(batch)
    return (batch.positions_N // own + start) * length + batch.positions_N % own
