"""What rows of pictures and of recordings, and their readers, have in common: stores on disk, and one file a row.

Legend: N rows.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from workbench.config import DataConfig
from workbench.config.sections.basic_sections import ID, WEIGHT
from workbench.config.sections.classes_config import ClassesConfig
from workbench.config.sections.image_config import MediaConfig
from workbench.data.batching import Indices
from workbench.data.images import picture_sources
from workbench.data.images.picture_sources import F, MediaKind
from workbench.data.images.picture_store import StoredPictures
from workbench.data.labelled import records
from workbench.data.labelled.record_table import LabelledRecord
from workbench.data.labelled.records import NamedColumns, RecordSource
from workbench.data.rows import MAX_MISTAKES, RawRow, convert_rows
from workbench.data.unread_columns import columns_in_file
from workbench.errors import DataError

Rows = TypeVar("Rows", bound="StoredRows")


@dataclass(frozen=True, eq=False)
class StoredRows(ABC):
    """Rows of one size in memory-mapped stores; see `RowInputs`."""

    stores: tuple[npt.NDArray[Any], ...]
    """What each row is prepared to."""
    place_N2: Indices
    """Store and number of each row."""
    key_N: Indices
    """A number from the content of each row, which decides how it is augmented: the same wherever the row stands."""

    @abstractmethod
    def arrays(self) -> Iterator[npt.NDArray[Any]]:
        """Each row as it is read."""

    def take(self: Rows, indices: Indices) -> Rows:
        """These rows alone."""
        return replace(self, place_N2=self.place_N2[indices], key_N=self.key_N[indices])

    def concatenated(self: Rows, other: Rows) -> Rows:
        """These rows, followed by those of `other`, which are augmented as these are."""
        moved_N2 = other.place_N2 + np.asarray([len(self.stores), 0])
        return replace(
            self,
            stores=(*self.stores, *other.stores),
            place_N2=np.concatenate([self.place_N2, moved_N2]),
            key_N=np.concatenate([self.key_N, other.key_N]),
        )

    def differ(self: Rows, other: Rows) -> npt.NDArray[np.bool_]:
        """Which rows are others there."""
        pairs = zip(self.arrays(), other.arrays(), strict=True)
        return np.asarray([not np.array_equal(one, two) for one, two in pairs], dtype=bool)


class StoredReader(ABC, Generic[F]):
    """Reads files of one kind from folders, archives, tables or hub data sets; see `RowReader`."""

    data: DataConfig
    classes: ClassesConfig
    kind: MediaKind[F]

    @property
    @abstractmethod
    def section(self) -> MediaConfig:
        """Where the files of a row stand."""

    @abstractmethod
    def _stored(self, source: RecordSource, *, refuse: bool, labelled: bool) -> RecordSource:
        """The rows whose files can be decoded, prepared; raises DataError for the others where they are refused."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The column of the files."""
        return (self.section.column,)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """None: no text is read."""
        return None

    def read(
        self,
        source: str,
        *,
        limit: int | None = None,
        labelled: bool = True,
        weighted: bool = False,
        columns: Mapping[str, str] | None = None,
    ) -> RecordSource:
        """Read, decode and prepare the rows of a source. Raises DataError: rows are malformed, or a column is
        missing."""
        named = self.data.with_columns(columns)
        data = named if weighted else named.unweighted

        def converter(first: RawRow) -> Callable[[RawRow], LabelledRecord]:
            if labelled:
                picture_sources.require_classes(source, first, self.kind)
            known = (*self.classes.labels, WEIGHT, ID)
            records.require_named(source, first, data, known, self.classes, labelled=labelled)
            records.require_label_columns(source, first, data, self.classes, labelled=labelled)
            return partial(records.labelled_record, config=data, classes=self.classes, labelled=labelled)

        skipped: list[str] = []
        column, folder = self.section.column, self.section.folder_of(source)
        where: dict[str, Any] = {"column": column, "folder": folder, "config": data, "kind": self.kind}
        rows = partial(picture_sources.read_rows, **where)
        reads = {column, *columns_in_file(data, (*self.classes.labels, WEIGHT, ID))}
        converted = convert_rows(
            source, converter, data, skipped=skipped, limit=limit, reader=rows, reads=lambda _: reads
        )
        found = tuple(converted)
        fingerprint = picture_sources.fingerprint(source, **where)
        return self._stored(
            RecordSource(source, fingerprint, found, tuple(skipped)),
            refuse=data.on_bad_row == "refuse",
            labelled=labelled,
        )

    def reread(self, source: str, fingerprint: str, rows: Sequence[NamedColumns]) -> RecordSource:
        """Rows that were read before, from their columns."""
        name = self.section.column
        mine = [RawRow(row.place, {**row.columns, name: columns[name]}) for row, columns in rows]
        found = tuple(LabelledRecord(row, ()) for row in mine)
        return self._stored(RecordSource(source, fingerprint, found), refuse=True, labelled=True)

    def describe(self, record: LabelledRecord) -> str:
        """The name of a row's file."""
        return self._file(record).name

    def _file(self, record: LabelledRecord) -> F:
        file = record.row.columns[self.section.column]
        assert isinstance(file, self.kind.file)
        return file

    def _readable(self, source: RecordSource, stored: StoredPictures, *, refuse: bool) -> Indices:
        """Numbers of the rows whose files were decoded.

        Raises:
            DataError: Others are refused, or there is none.
        """
        mistakes, rows = stored.mistakes, len(source.records)
        if mistakes and refuse:
            shown = [mistakes[number] for number in sorted(mistakes)[:MAX_MISTAKES]]
            count = f"1 {self.kind.one}" if len(mistakes) == 1 else f"{len(mistakes)} {self.kind.many}"
            more = [f"  and {len(mistakes) - len(shown)} more"] if len(mistakes) > len(shown) else []
            remedy = "Replace or delete them, or write data.on_bad_row=skip to leave them out and count them."
            title = f"{source.name}: {count} of {rows} cannot be read:"
            raise DataError("\n".join([title, *(f"  {text}" for text in shown), *more, remedy]))
        numbers = np.asarray([number for number in range(rows) if number not in mistakes], dtype=np.int64)
        if not len(numbers):
            last = mistakes[rows - 1]
            raise DataError(f"{source.name}: none of its {self.kind.many} can be read. The last one: {last}")
        return numbers


def digests(stored: StoredPictures, numbers: Indices) -> list[str]:
    """Of what was stored of rows, by which they are told apart, split and augmented."""
    return [hashlib.blake2b(stored.pixels[number].tobytes(), digest_size=16).hexdigest() for number in numbers]


def places(digests_N: Sequence[str], numbers: Indices) -> tuple[Indices, Indices]:
    """`place_N2` and `key_N` of rows of one store."""
    keys = np.asarray([int(digest[:14], 16) for digest in digests_N], dtype=np.int64)
    return np.stack([np.zeros_like(numbers), numbers], axis=1), keys


def kept(
    source: RecordSource, stored: StoredPictures, digests_N: Sequence[str], numbers: Indices, inputs: Any
) -> RecordSource:
    """The rows of a source that were decoded, with their inputs."""
    own = (
        source.records[number]._replace(digest=digest)
        for number, digest in zip(numbers.tolist(), digests_N, strict=True)
    )
    skipped = (*source.skipped, *stored.mistakes.values())
    return RecordSource(source.name, source.fingerprint, tuple(own), skipped, inputs)
