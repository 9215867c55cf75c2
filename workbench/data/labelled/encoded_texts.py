"""Tokens of rows of text, end to end in one store: 17 bytes a row in memory, where an array a row takes over 200.

Shapes: N rows, A tokens of all of them, T tokens of one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from workbench.data.batching import Indices
from workbench.data.byte_store import ByteStore

BYTES = 4
"""Size of a token."""


class FieldTokens(NamedTuple):
    """Tokens of a row (T,), and whether it was truncated."""

    input_ids: Indices
    truncated: bool


@dataclass(frozen=True, eq=False)
class EncodedTexts:
    """Tokenised rows, int32 in one store; rows that were taken from others share it with them."""

    store: ByteStore
    start_N: Indices
    length_N: Indices
    truncated_N: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, rows: Iterable[FieldTokens]) -> EncodedTexts:
        """Copy the tokens of rows, of which no two have to be in memory together."""
        lengths, truncated = array("q"), array("b")

        def stored(row: FieldTokens) -> bytes:
            lengths.append(len(row.input_ids))
            truncated.append(row.truncated)
            return row.input_ids.astype(np.int32).tobytes()

        store = ByteStore(map(stored, rows))
        length_N = np.asarray(lengths, dtype=np.int64)
        return cls(store, np.cumsum(length_N) - length_N, length_N, np.asarray(truncated, dtype=bool))

    def __len__(self) -> int:
        return len(self.length_N)

    def __getitem__(self, index: int) -> FieldTokens:
        start = int(self.start_N[index])
        read = self.store.read(BYTES * start, BYTES * (start + int(self.length_N[index])))
        return FieldTokens(np.frombuffer(read, dtype=np.int32).astype(np.int64), bool(self.truncated_N[index]))

    def __iter__(self) -> Iterator[FieldTokens]:
        return (self[index] for index in range(len(self)))

    def take(self, indices: Indices) -> EncodedTexts:
        """The rows `indices`."""
        return EncodedTexts(self.store, self.start_N[indices], self.length_N[indices], self.truncated_N[indices])

    def concatenated(self, other: EncodedTexts) -> EncodedTexts:
        """These rows, followed by those of `other`."""
        return EncodedTexts(
            ByteStore(chain(self.store.chunks(), other.store.chunks())),
            np.concatenate([self.start_N, len(self.store) // BYTES + other.start_N]),
            np.concatenate([self.length_N, other.length_N]),
            np.concatenate([self.truncated_N, other.truncated_N]),
        )
