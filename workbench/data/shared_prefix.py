"""Rows that begin alike, in one sequence: what all share comes once, then the rest of each row.

A system prompt or few-shot examples in front of every row are computed once in a forward pass, and once in the backward
pass, where the gradients of all rows meet. `workbench.models.packed_attention` lets each rest see what is shared and
itself.

Legend: B rows of a micro-batch, L padded length, N supervised positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from workbench.data.arrangement import MASK, NO_MASK, PACKED, Packed
from workbench.data.batching import Examples, Indices, MicroBatch

ROOM = 2
"""Tokens of rests for each shared one in a micro-batch: what is shared is then a third of it at most."""
AT_ONCE = 256
"""Rows that are read at a time."""


@dataclass(frozen=True)
class SharedPrefix(Packed):
    """A beginning that rows share lies before their rests, which lie one after another."""

    prefix: int
    """Tokens that all rows begin with; each row has at least one more."""

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
        if (shared := min(self.prefix, common(ids_BL, lengths_B))) == 0:
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


def common(ids_BL: Tensor, lengths_B: Tensor) -> int:
    """Tokens with which all rows begin, and of which each has at least one more."""
    same_L = (ids_BL == ids_BL[:1]).all(0)
    return min(int(same_L.cumprod(0).sum()), int(lengths_B.min()) - 1)


def of_all(train: Examples, *, least: int) -> int:
    """Tokens with which all rows begin, and of which each has at least one more; 0 where they are fewer than `least`.

    All rows are read where they have that many in common; else a few tell.
    """
    first: Tensor | None = None
    shared, rows = int(train.lengths.min()) - 1, len(train.lengths)
    for start in range(0, rows, AT_ONCE):
        if shared < least:
            return 0
        batch = train.batch(np.arange(start, min(rows, start + AT_ONCE)))
        ids_BL, lengths_B = batch.inputs["input_ids"], batch.lengths_B
        if lengths_B is None:
            return 0
        first = ids_BL[:1, :shared] if first is None else first[:, :shared]
        both_BL = torch.cat([first, ids_BL[:, : first.shape[1]]])
        shared = min(shared, common(both_BL, torch.cat([lengths_B[:1] * 0 + shared + 1, lengths_B])))
    return shared if shared >= least else 0
