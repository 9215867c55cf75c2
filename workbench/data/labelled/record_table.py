"""Labelled rows and their tokens, many of them in little memory.

Legend: N rows, A tokens of all of them, T tokens of one.
"""

from __future__ import annotations

import os
import pickle
import weakref
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from tempfile import SpooledTemporaryFile
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from workbench.data.batching import Indices
from workbench.data.folds.duplicates import normalised
from workbench.data.labelled.labels import Floats, Label
from workbench.data.rows import RawRow
from workbench.errors import FileError
from workbench.runs.files import cache_folder

IN_MEMORY = 2**24  # most bytes that are kept in memory


class ByteStore:
    """Chunks end to end. A file is read by `pread`, so that what was read takes no memory, as mapped pages would.
    Raises FileError: there is no room for the file."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        folder = cache_folder()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with ExitStack() as stack:
                file = stack.enter_context(SpooledTemporaryFile(IN_MEMORY, dir=str(folder)))
                for chunk in chunks:
                    file.write(chunk)
                self._size = file.tell()
                file.seek(0)
                self._few = file.read() if self._size <= IN_MEMORY else None
                if self._few is None:
                    self._file = file
                    weakref.finalize(self, stack.pop_all().close)
        except OSError as error:
            raise FileError(
                f"{folder}: cannot be written ({error.strerror}). Make room there, or set WORKBENCH_CACHE to another "
                "folder."
            ) from None

    def __len__(self) -> int:
        return self._size

    def read(self, start: int, stop: int) -> bytes:
        """The bytes from `start` up to `stop`."""
        return os.pread(self._file.fileno(), stop - start, start) if self._few is None else self._few[start:stop]

    def chunks(self) -> Iterator[bytes]:
        """All of them, a part at a time."""
        for start in range(0, self._size, IN_MEMORY):
            yield self.read(start, min(start + IN_MEMORY, self._size))


TOKEN_BYTES = 4  # size of a token


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
        """Copy the tokens of rows, which are read one at a time."""
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
        read = self.store.read(TOKEN_BYTES * start, TOKEN_BYTES * (start + int(self.length_N[index])))
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
            np.concatenate([self.start_N, len(self.store) // TOKEN_BYTES + other.start_N]),
            np.concatenate([self.length_N, other.length_N]),
            np.concatenate([self.truncated_N, other.truncated_N]),
        )


Objects = npt.NDArray[np.object_]


class LabelledRecord(NamedTuple):
    """One row."""

    row: RawRow  # the row as it was read, with all its columns
    fields: tuple[str, ...]  # the text of each column of the template
    label: Label | None = None
    weight: float = 1.0
    digest: str = ""  # digest of the pixels of a picture; empty for text

    @property
    def place(self) -> str:
        """File and row."""
        return self.row.place

    @property
    def key(self) -> str:
        """Equal for rows with the same content: the text but for case and punctuation, or the digest of a picture."""
        return self.digest or normalised("\n".join(self.fields))

    @property
    def content(self) -> str | tuple[str, ...]:
        """What was read, as it stands."""
        return self.digest or self.fields


@dataclass(frozen=True, eq=False)
class RecordTable(Sequence[LabelledRecord]):
    """Records that are made again whenever one is asked for: 40 bytes each in memory, where objects take 600.

    Place, cells and fields of a row are a pickle in one store, in which a text that is both a cell and a field stands
    once. Unlike an Arrow table it gives back what was read, to the type: a null that a row has, a key that it lacks,
    integers of any size. Rows that were taken from others share the store with them.
    """

    store: ByteStore
    start_N: Indices
    end_N: Indices
    names_N: Objects  # names of the columns of each row; rows with the same ones share them
    labels_N: Objects
    weight_N: Floats

    @classmethod
    def of(cls, records: Iterable[LabelledRecord]) -> RecordTable:
        """Copy records, which are read one at a time."""
        lengths, weights = array("q"), array("d")
        names: list[tuple[str, ...]] = []
        labels: list[Label | None] = []
        known: dict[Any, Any] = {}

        def pickled(record: LabelledRecord) -> bytes:
            assert not record.row.mistake, "a malformed row is no record"
            columns, label = record.row.columns, record.label
            row_bytes = pickle.dumps((record.row.place, *columns.values(), record.fields, record.digest), protocol=5)
            lengths.append(len(row_bytes))
            # Equal labels and names are kept once; a number stays as it is, since 0.0 equals -0.0.
            labels.append(label if isinstance(label, float) else known.setdefault(label, label))
            names.append(known.setdefault(named := tuple(columns), named))
            weights.append(record.weight)
            return row_bytes

        store = ByteStore(map(pickled, records))
        end_N = np.cumsum(np.asarray(lengths, dtype=np.int64))
        return cls(
            store,
            end_N - np.asarray(lengths, dtype=np.int64),
            end_N,
            np.fromiter(names, dtype=object, count=len(names)),
            np.fromiter(labels, dtype=object, count=len(labels)),
            np.asarray(weights, dtype=np.float64),
        )

    def __len__(self) -> int:
        return len(self.end_N)

    @overload
    def __getitem__(self, index: int) -> LabelledRecord: ...
    @overload
    def __getitem__(self, index: slice) -> RecordTable: ...
    def __getitem__(self, index: int | slice) -> LabelledRecord | RecordTable:
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        place, *cells, fields, digest = pickle.loads(self.store.read(int(self.start_N[index]), int(self.end_N[index])))
        row = RawRow(place, dict(zip(self.names_N[index], cells, strict=True)))
        return LabelledRecord(row, fields, self.labels_N[index], float(self.weight_N[index]), digest)

    def take(self, indices: Indices) -> RecordTable:
        """The rows `indices`."""
        return RecordTable(
            self.store,
            self.start_N[indices],
            self.end_N[indices],
            self.names_N[indices],
            self.labels_N[indices],
            self.weight_N[indices],
        )

    def concatenated(self, other: RecordTable) -> RecordTable:
        """These rows, followed by those of `other`."""
        return RecordTable(
            ByteStore(chain(self.store.chunks(), other.store.chunks())),
            np.concatenate([self.start_N, len(self.store) + other.start_N]),
            np.concatenate([self.end_N, len(self.store) + other.end_N]),
            np.concatenate([self.names_N, other.names_N]),
            np.concatenate([self.labels_N, other.labels_N]),
            np.concatenate([self.weight_N, other.weight_N]),
        )


class RawRows(Sequence[RawRow]):
    """The rows of records as they were read, each made when it is asked for."""

    def __init__(self, records: Sequence[LabelledRecord]) -> None:
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, index: int) -> RawRow: ...
    @overload
    def __getitem__(self, index: slice) -> RawRows: ...
    def __getitem__(self, index: int | slice) -> RawRow | RawRows:
        return RawRows(self._records[index]) if isinstance(index, slice) else self._records[index].row


def taken(records: Sequence[LabelledRecord], indices: Indices) -> Sequence[LabelledRecord]:
    """The rows `indices`."""
    return records.take(indices) if isinstance(records, RecordTable) else tuple(records[index] for index in indices)


def joined(first: Sequence[LabelledRecord], second: Sequence[LabelledRecord]) -> Sequence[LabelledRecord]:
    """The rows of both."""
    if isinstance(first, RecordTable) and isinstance(second, RecordTable):
        return first.concatenated(second)
    return (*first, *second)


def prefixed(records: Sequence[LabelledRecord], prefix: str) -> Sequence[LabelledRecord]:
    """The same rows, whose places begin with `prefix`."""
    if not prefix:
        return records
    renamed = (each._replace(row=replace(each.row, place=prefix + each.place)) for each in records)
    return RecordTable.of(renamed) if isinstance(records, RecordTable) else tuple(renamed)


def labels_of(records: Sequence[LabelledRecord]) -> list[Any]:
    """The label of each row."""
    return records.labels_N.tolist() if isinstance(records, RecordTable) else [record.label for record in records]
