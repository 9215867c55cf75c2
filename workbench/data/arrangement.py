"""How the rows of a micro-batch lie in its tensors: padded to the longest, or packed one after another.

Legend: B rows of a micro-batch, L padded length, T tokens of all rows, N supervised positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from workbench.data.batching import Examples, Indices, MicroBatch, micro_batches

MASK = "attention_mask"
NO_MASK = (1, 1, 0, 0)
"""Shape of a packed sequence's attention mask. Transformers takes a mask of four dimensions as it is, and so builds
none of T x T; attention that does not know packed rows cannot use it, and fails rather than let rows see each other."""


class Arrangement(ABC):
    """Cuts a global batch into micro-batches, and lays out their rows."""

    prefix: int = 0
    """Tokens at the beginning of all rows that a micro-batch holds once."""

    @property
    @abstractmethod
    def packed(self) -> bool:
        """Whether rows lie one after another in one sequence."""

    def batch(self, rows: Examples, indices: Indices, *, epoch: int) -> MicroBatch:
        """The examples `indices`, laid out, as they are in pass `epoch` over the data."""
        return self.lay(rows.batch(indices, epoch=epoch))

    @abstractmethod
    def cut(self, indices: Indices, lengths: Indices, *, tokens: int) -> Iterator[Indices]:
        """Micro-batches of at most `tokens` each, longest rows first; a longer row has one of its own.

        Args:
            lengths: Tokens of every example, which `indices` index.
        """

    @abstractmethod
    def tokens(self, lengths_B: Indices) -> int:
        """Tokens that a micro-batch of such rows computes."""

    @abstractmethod
    def pairs(self, lengths_B: Indices) -> int:
        """Pairs of tokens that its attention computes."""

    def worth(self, tokens: int) -> int:
        """Tokens worth a forward pass, where so many are worth one of padded rows."""
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


class Padded(Arrangement):
    """Rows are padded to the longest of their micro-batch."""

    @property
    def packed(self) -> bool:
        """No."""
        return False

    def cut(self, indices: Indices, lengths: Indices, *, tokens: int) -> Iterator[Indices]:
        """See `micro_batches`."""
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


class Packed(Arrangement):
    """Rows lie one after another in one sequence: positions restart with each, and no row sees another.

    What computes each token by itself computes no padding; `workbench.models.packed_attention` reads the rows' lengths.
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
        """The rows of a padded micro-batch of a model without a separate decoder, packed."""
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
            },
            positions_N=start_B[padded.positions_N // length] + padded.positions_N % length,
            lengths_B=None,
        )


PADDED: Arrangement = Padded()
PACKED: Arrangement = Packed()
