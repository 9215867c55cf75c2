"""Tokens of rows of text, end to end in one array: 4 bytes a token and 17 a row, where an array a row takes over 200.

Shapes: N rows, A tokens of all of them, T tokens of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from workbench.data.batching import Indices


class FieldTokens(NamedTuple):
    """Tokens of a row (T,), and whether it was truncated."""

    input_ids: Indices
    truncated: bool


@dataclass(frozen=True, eq=False)
class EncodedTexts:
    """Tokenised rows, each of which is a part of `ids_A`; rows that were taken from others share it with them."""

    ids_A: npt.NDArray[np.int32]
    start_N: Indices
    length_N: Indices
    truncated_N: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, rows: Iterable[FieldTokens]) -> EncodedTexts:
        """Copy the tokens of rows, of which no two have to be in memory together."""
        ids, lengths, truncated = bytearray(), [], []
        for row in rows:
            ids += row.input_ids.astype(np.int32).tobytes()
            lengths.append(len(row.input_ids))
            truncated.append(row.truncated)
        length_N = np.asarray(lengths, dtype=np.int64)
        start_N = np.cumsum(length_N) - length_N
        return cls(np.frombuffer(ids, dtype=np.int32), start_N, length_N, np.asarray(truncated, dtype=bool))

    def __len__(self) -> int:
        return len(self.length_N)

    def __getitem__(self, index: int) -> FieldTokens:
        start = self.start_N[index]
        ids_T = self.ids_A[start : start + self.length_N[index]].astype(np.int64)
        return FieldTokens(ids_T, bool(self.truncated_N[index]))

    def __iter__(self) -> Iterator[FieldTokens]:
        return (self[index] for index in range(len(self)))

    def take(self, indices: Indices) -> EncodedTexts:
        """The rows `indices`."""
        return EncodedTexts(self.ids_A, self.start_N[indices], self.length_N[indices], self.truncated_N[indices])

    def concatenated(self, other: EncodedTexts) -> EncodedTexts:
        """These rows, followed by those of `other`."""
        return EncodedTexts(
            np.concatenate([self.ids_A, other.ids_A]),
            np.concatenate([self.start_N, len(self.ids_A) + other.start_N]),
            np.concatenate([self.length_N, other.length_N]),
            np.concatenate([self.truncated_N, other.truncated_N]),
        )
