"""Rows of tokens in an Arrow file, memory-mapped: read one by one, or a column of numbers at a time."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
from typing_extensions import Self


class TokenTable:
    """Rows of one file, or of several end to end.

    Args:
        data: The rows; no batch is copied.
        identity: Names all that the rows were made of.
    """

    def __init__(self, data: pyarrow.Table, identity: str = "") -> None:
        self.data, self.identity = data, identity
        self._batches: list[pyarrow.RecordBatch] = data.to_batches()
        self._starts = list(itertools.accumulate(map(len, self._batches), initial=0))

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """The rows of a file that bears the hash of what they were made of as its name."""
        return cls(pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))).read_all(), path.stem)

    @classmethod
    def joined(cls, tables: Sequence[TokenTable]) -> Self:
        """The rows of several tables, in their order."""
        return cls(pyarrow.concat_tables([each.data for each in tables]), "+".join(each.identity for each in tables))

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, number: int) -> dict[str, Any]:
        row: dict[str, Any] = self.row(number).to_pylist()[0]
        return row

    def row(self, number: int) -> pyarrow.RecordBatch:
        """One row, as a batch."""
        batch = bisect_right(self._starts, number) - 1
        return self._batches[batch].slice(number - self._starts[batch], 1)

    def numbers(self, name: str) -> npt.NDArray[Any]:
        """A column of numbers or truth values none of which is null."""
        return np.concatenate([values(batch.column(name)) for batch in self._batches])


def values(array: pyarrow.Array) -> npt.NDArray[Any]:
    """Numbers or truth values of an array without nulls. pyarrow's own `to_numpy` imports pandas, which takes 0.2 s."""
    buffer, stop = array.buffers()[1], array.offset + len(array)
    if not pyarrow.types.is_boolean(array.type):
        kind = np.dtype(array.type.to_pandas_dtype())
        numbers_N: npt.NDArray[Any] = np.ndarray(len(array), kind, buffer=buffer, offset=array.offset * kind.itemsize)
        return numbers_N
    bits = np.ndarray(-(-stop // 8), np.uint8, buffer=buffer)[array.offset // 8 :]
    marks_N: npt.NDArray[np.bool_] = np.unpackbits(bits, bitorder="little")[array.offset % 8 :].view(np.bool_)
    return marks_N[: len(array)]
