"""How the rows of a micro-batch lie in its tensors: padded to the longest, packed one after another, or with a shared
prefix once.

Packed rows lie in one sequence: positions restart with each, and no row sees another. Rows that begin alike can share
their first tokens: a system prompt or few-shot examples in front of every row are computed once in a forward pass, and
once in the backward pass, where the gradients of all rows meet. `workbench.models.attention_backend` reads the rows'
lengths, and lets each rest see what is shared and itself. Rows of several owners, such as the members of a bank, can
lie in one micro-batch.

Legend: B rows of a micro-batch, L padded length, T tokens of all rows, N supervised positions.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.data.batching import Examples, Indices, MicroBatch, micro_batches
from workbench.data.text.media import TYPES

MASK = "attention_mask"
NO_MASK = (1, 1, 0, 0)
"""Shape of a packed sequence's attention mask. Transformers takes a mask of four dimensions as it is, and so builds
none of T x T; attention that does not know packed rows cannot use it, and fails rather than let rows see each other."""


class RowLayout(ABC):
    """Cuts a global batch into micro-batches, and lays out their rows."""

    prefix: int = 0  # tokens at the beginning of all rows that a micro-batch holds once

    @property
    @abstractmethod
    def packed(self) -> bool:
        """Whether rows lie one after another in one sequence."""

    def batch(self, rows: Examples, indices: Indices, *, epoch: int) -> MicroBatch:
        """The examples `indices`, laid out, as they are in pass `epoch` over the data."""
        return self.lay(rows.batch(indices, epoch=epoch))

    @abstractmethod
    def cut(self, indices: Indices, lengths: Indices, *, tokens: int) -> Iterator[Indices]:
        """Micro-batches of at most `tokens` each, longest rows first; a longer row has one of its own. `lengths`:
        tokens of every example, which `indices` index."""

    @abstractmethod
    def tokens(self, lengths_B: Indices) -> int:
        """Tokens that a micro-batch of such rows computes."""

    @abstractmethod
    def pairs(self, lengths_B: Indices) -> int:
        """Pairs of tokens that its attention computes."""

    def worth(self, tokens: int) -> int:
        """Token budget of a forward pass, given the budget for padded rows."""
        return tokens

    def facts(self) -> dict[str, Any]:
        """How rows lie, for the manifest."""
        return {"packed": self.packed, "shared_tokens": self.prefix}

    def in_words(self) -> str:
        """Rows, and what is special about how they lie."""
        return "rows"

    @abstractmethod
    def lay(self, padded: MicroBatch) -> MicroBatch:
        """The same rows, laid out."""


class Padded(RowLayout):
    """Rows are padded to the longest of their micro-batch."""

    @property
    def packed(self) -> bool:
        """No."""
        return False

    def cut(self, indices: Indices, lengths: Indices, *, tokens: int) -> Iterator[Indices]:
        return micro_batches(indices, lengths, tokens=tokens)

    def tokens(self, lengths_B: Indices) -> int:
        """Padding included."""
        return len(lengths_B) * int(lengths_B.max())

    def pairs(self, lengths_B: Indices) -> int:
        """Those of padding included."""
        return self.tokens(lengths_B) * int(lengths_B.max())

    def lay(self, padded: MicroBatch) -> MicroBatch:
        """The batch as it is."""
        return padded


class Packed(RowLayout):
    """Rows lie one after another in one sequence: positions restart with each, and no row sees another.

    No padding is computed; `workbench.models.attention_backend` reads the lengths of the rows.
    """

    @property
    def packed(self) -> bool:
        """Yes."""
        return True

    def cut(self, indices: Indices, lengths: Indices, *, tokens: int) -> Iterator[Indices]:
        """Fill micro-batches with rows, each row going to the first with room for it (first-fit decreasing)."""
        parts: list[list[int]] = []
        room = np.zeros(0, dtype=np.int64)
        for row in indices[np.lexsort((indices, -lengths[indices]))]:
            roomy = np.flatnonzero(room >= lengths[row])
            if len(roomy):
                place = int(roomy[0])
                parts[place].append(int(row))
            else:
                place = len(parts)
                parts.append([int(row)])
                room = np.append(room, tokens)
            room[place] -= lengths[row]
        yield from (np.asarray(part, dtype=np.int64) for part in parts)

    def tokens(self, lengths_B: Indices) -> int:
        """There is no padding."""
        return int(lengths_B.sum())

    def pairs(self, lengths_B: Indices) -> int:
        """Tokens of one row with each other."""
        return int((lengths_B**2).sum())

    def lay(self, padded: MicroBatch) -> MicroBatch:
        """The rows of a padded micro-batch of a model without a separate decoder, packed; pictures stay in order."""
        ids_BL = padded.inputs["input_ids"]
        assert "decoder_input_ids" not in padded.inputs, "an encoder and a decoder read sequences of their own"
        length = ids_BL.shape[1]
        lengths_B = padded.inputs[MASK].sum(1) if MASK in padded.inputs else padded.lengths_B
        assert lengths_B is not None, "the lengths of rows say where they end"
        real_BL = torch.arange(length) < lengths_B[:, None]
        position_BL = torch.arange(length).expand_as(ids_BL)
        start_B = lengths_B.cumsum(0) - lengths_B
        return replace(
            padded,
            inputs={
                "input_ids": ids_BL[real_BL][None],
                "position_ids": position_BL[real_BL][None],
                MASK: torch.zeros(NO_MASK, dtype=torch.bool),
                "row_lengths": lengths_B,
                "row_starts": F.pad(lengths_B.cumsum(0), (1, 0)).int(),
                **{name: each for name, each in padded.inputs.items() if name not in ("input_ids", MASK)},
            },
            positions_N=start_B[padded.positions_N // length] + padded.positions_N % length,
            lengths_B=None,
        )


PADDED: RowLayout = Padded()
PACKED: RowLayout = Packed()


def filled(packed: MicroBatch, tokens: int) -> MicroBatch:
    """Packed rows, filled up to so many tokens by rows that nobody looks at, as long as the longest of them."""
    if not (more := tokens - packed.width):
        return packed
    lengths_B = packed.inputs["row_lengths"]
    longest = int(lengths_B.max())
    lengths_B = torch.cat([lengths_B, lengths_B.new_tensor([*[longest] * (more // longest), more % longest])])
    lengths_B = lengths_B[lengths_B > 0]
    inputs = {
        **packed.inputs,
        "input_ids": F.pad(packed.inputs["input_ids"], (0, more)),
        "position_ids": torch.cat([packed.inputs["position_ids"], torch.arange(more)[None] % longest], dim=1),
        "row_lengths": lengths_B,
        "row_starts": F.pad(lengths_B.cumsum(0), (1, 0)).int(),
    }
    return replace(packed, inputs=inputs, filler=more)


ROOM = 2  # tokens of rests for each shared one in a micro-batch: what is shared is then a third of it at most
ROWS_AT_ONCE = 256  # rows that are read at a time


@dataclass(frozen=True)
class SharedPrefix(Packed):
    """A beginning that rows share lies before their rests, which lie one after another."""

    prefix: int  # tokens that all rows begin with; each row has at least one more

    def cut(self, indices: Indices, lengths: Indices, *, tokens: int) -> Iterator[Indices]:
        """Fill micro-batches with rests; what is shared is in each of them."""
        yield from super().cut(indices, self._rests(lengths), tokens=tokens - self.prefix)

    def tokens(self, lengths_B: Indices) -> int:
        """A shared beginning counts once."""
        return self.prefix + int(self._rests(lengths_B).sum())

    def pairs(self, lengths_B: Indices) -> int:
        """Tokens of a rest with its whole row, and of what is shared with itself."""
        return self.prefix**2 + int((self._rests(lengths_B) * lengths_B).sum())

    def worth(self, tokens: int) -> int:
        """Room for what is shared, and for so much more that little of the time goes into it."""
        return self.prefix + max(tokens, ROOM * self.prefix)

    def in_words(self) -> str:
        return f"rows, whose first {self.prefix:,} tokens each forward pass computes once"

    def lay(self, padded: MicroBatch) -> MicroBatch:
        """The rows of a padded micro-batch of a causal model; rows that share less are laid out with less."""
        ids_BL, lengths_B = padded.inputs["input_ids"], padded.lengths_B
        assert lengths_B is not None, "rows of a causal model have no mask"
        if (shared := min(self.prefix, common_prefix(ids_BL, lengths_B))) == 0:
            return PACKED.lay(padded)
        column_L = torch.arange(ids_BL.shape[1])
        rest_BL = (column_L >= shared) & (column_L < lengths_B[:, None])
        rests_B = lengths_B - shared
        start_B = shared + rests_B.cumsum(0) - rests_B
        row_N, place_N = padded.positions_N // len(column_L), padded.positions_N % len(column_L)
        return replace(
            padded,
            inputs={
                "input_ids": torch.cat([ids_BL[0, :shared], ids_BL[rest_BL]])[None],
                "position_ids": torch.cat([column_L[:shared], column_L.expand_as(ids_BL)[rest_BL]])[None],
                MASK: torch.zeros(NO_MASK, dtype=torch.bool),
                "row_lengths": rests_B,
                "prefix_tokens": torch.tensor([shared]),
            },
            positions_N=torch.where(place_N < shared, place_N, start_B[row_N] + place_N - shared),
            lengths_B=None,
            row_N=row_N,
        )

    def _rests(self, lengths: Indices) -> Indices:
        """Tokens of each row that are its own; a row that a view has cut short counts as one."""
        rests: Indices = np.maximum(lengths - self.prefix, 1)
        return rests


def common_prefix(ids_BL: Tensor, lengths_B: Tensor) -> int:
    """Tokens that all rows begin with, each having at least one more."""
    same_L = (ids_BL == ids_BL[:1]).all(0)
    return min(int(same_L.cumprod(0).sum()), int(lengths_B.min()) - 1)


def prefix_of_all(train: Examples, *, least: int) -> int:
    """Tokens that all rows begin with, each having at least one more; 0 if fewer than `least`.

    All rows are read where they have that many in common; else a few tell.
    """
    first: Tensor | None = None
    shared, rows = int(train.lengths.min()) - 1, len(train.lengths)
    for start in range(0, rows, ROWS_AT_ONCE):
        if shared < least:
            return 0
        batch = train.batch(np.arange(start, min(rows, start + ROWS_AT_ONCE)))
        ids_BL, lengths_B = batch.inputs["input_ids"], batch.lengths_B
        if lengths_B is None or batch.inputs.keys() - {"input_ids"}:  # pictures differ behind the same tokens
            return 0
        first = ids_BL[:1, :shared] if first is None else first[:, :shared]
        both_BL = torch.cat([first, ids_BL[:, : first.shape[1]]])
        shared = min(shared, common_prefix(both_BL, torch.cat([lengths_B[:1] * 0 + shared + 1, lengths_B])))
    return shared if shared >= least else 0


class OwnerRows(NamedTuple):
    """Rows of one owner in a micro-batch."""

    owner: int
    indices: Indices
    counts: bool = True  # whether they carry loss


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
    labels: list[int]  # number of labels of each owner's rows
    numbered: list[tuple[Indices, Indices | None]]  # see `MicroBatch.numbered`, of each owner's rows

    def pinned(self) -> JoinedRows:
        """The same in memory from which an accelerator copies while it computes."""
        return self._replace(batch=self.batch.pinned())


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors one after another, padded with zeros at the end of each other dimension to the largest."""
    largest = [max(sizes) for sizes in zip(*(each.shape[:0:-1] for each in tensors), strict=True)]
    return torch.cat(
        [
            F.pad(each, [pad for most, own in zip(largest, each.shape[:0:-1], strict=True) for pad in (0, most - own)])
            for each in tensors
        ]
    )


def join(batches: Sequence[MicroBatch]) -> MicroBatch:
    """One micro-batch with the rows of all, in their order, padded to the longest with zeros that nothing looks at."""
    counts = list(map(_rows, batches))
    length = max(map(padded_length, batches))
    starts = np.cumsum([0, *counts[:-1]])
    inputs = {}
    for name in dict.fromkeys(itertools.chain.from_iterable(batch.inputs for batch in batches)):
        blank = name in TYPES  # rows of text alone have no pictures, and yet a type for each token
        given = [
            each.inputs.get(name, torch.zeros_like(each.inputs["input_ids"]) if blank else None) for each in batches
        ]
        inputs[name] = stacked([tensor for tensor in given if tensor is not None])
    positions = []  # flat, in rows of `length`
    for batch, start in zip(batches, starts.tolist(), strict=True):
        own = padded_length(batch)
        positions.append((batch.positions_N // own + start) * length + batch.positions_N % own)
    known = [batch.lengths_B for batch in batches if batch.lengths_B is not None] or None
    labels = [batch.labels_N for batch in batches]
    widest = max(each.shape[-1] for each in labels) if labels[0].ndim > 1 else 0
    narrow = labels[0].ndim > 1 and any(each.shape[-1] < widest for each in labels)
    return MicroBatch(
        inputs=inputs,
        positions_N=torch.cat(positions),
        labels_N=torch.cat([F.pad(each, (0, widest - each.shape[-1])) for each in labels] if narrow else labels),
        tokens=sum(batch.tokens for batch in batches),
        lengths_B=None if known is None else torch.cat(known),
        sequences=batches[0].sequences,
    )


def laid_together(batches: Sequence[MicroBatch], arrangement: RowLayout) -> MicroBatch:
    """One micro-batch with the rows of all, in their order, laid out; packed ones know whose they are."""
    laid = arrangement.lay(join(batches))
    return _owned(laid, batches) if arrangement.packed else laid


def _owned(packed: MicroBatch, batches: Sequence[MicroBatch]) -> MicroBatch:
    owners_B = torch.repeat_interleave(torch.arange(len(batches)), torch.tensor([_rows(batch) for batch in batches]))
    return replace(packed, inputs={**packed.inputs, "row_owners": owners_B})


def _rows(batch: MicroBatch) -> int:
    lengths_B = batch.inputs.get("row_lengths")
    return len(next(iter(batch.inputs.values())) if lengths_B is None else lengths_B)


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
    """L, at whose positions something is predicted; all pictures or recordings have the same number."""
    for name in ("decoder_input_ids", "input_ids"):
        if name in batch.inputs:
            return batch.inputs[name].shape[1]
    return batch.tokens // len(next(iter(batch.inputs.values())))
