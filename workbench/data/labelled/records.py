"""Labelled rows of a file: the columns that the model reads, label and weight, and what reads them for a backbone.

Legend: B rows of a micro-batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from workbench.config import DataConfig
from workbench.config.sections.basic_sections import ID, WEIGHT
from workbench.config.sections.classes_config import PAIR_FIELDS, ClassesConfig
from workbench.data import named_sets, resampling
from workbench.data.batching import Indices
from workbench.data.folds.duplicates import DuplicateClusters
from workbench.data.labelled import labels, record_table
from workbench.data.labelled.record_table import LabelledRecord, RecordTable
from workbench.data.rows import RawRow, convert_rows, excerpt, fingerprint
from workbench.data.text.formats import renamed
from workbench.data.unread_columns import columns_in_file
from workbench.errors import DataError
from workbench.schema import did_you_mean

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


class Mix(NamedTuple):
    """Rows that were mixed with others, as mixup and CutMix do."""

    partner_B: Indices  # the other row of each, by its number in the set
    share_B: npt.NDArray[np.float64]  # share of the row's own label; the rest is its partner's


class ModelInputs(NamedTuple):
    """Rows as a model reads them together."""

    inputs: dict[str, Tensor]  # arguments of the model
    positions_B: Tensor  # flat index of each row's last real token among all of the micro-batch
    tokens: int  # tokens or patches without padding
    mix: Mix | None = None


class RowInputs(Protocol):
    """Rows in the form that a backbone reads, without their labels."""

    @property
    def lengths(self) -> Indices:
        """Tokens or patches of each row."""

    @property
    def truncated(self) -> int:
        """Number of rows that lost a part."""

    @property
    def redrawn(self) -> bool:
        """Whether a row that an epoch draws again is read in another way."""

    def batch(self, indices: Indices, *, epoch: int | None, repeats: Indices | None = None) -> ModelInputs:
        """The rows `indices`, padded. `epoch`: pass over the training rows, which decides how each is augmented; None:
        as they are. `repeats`: how often the epoch has drawn each of them before (B,); None: never."""

    def rewritten(self, *, epoch: int, progress: float) -> Self:
        """The rows as a step of pass `epoch` reads them, after a share of the run, where that changes their lengths."""

    def take(self, indices: Indices) -> Self:
        """The rows `indices`."""

    def concatenated(self, other: Self) -> Self:
        """These rows, followed by those of `other`."""

    def arrays(self) -> Iterator[npt.NDArray[Any]]:
        """All arrays that the rows consist of, by which sets are told apart."""

    def differ(self, other: Self) -> npt.NDArray[np.bool_]:
        """Which rows (N,) are not the same in `other`."""


@dataclass(frozen=True)
class RecordSource:
    """The usable rows of a file."""

    name: str
    fingerprint: str
    records: Sequence[LabelledRecord]
    """Texts stand in a `RecordTable`."""
    skipped: tuple[str, ...] = ()
    inputs: RowInputs | None = None
    """The rows as a model reads them, where that is known as soon as they are read, as pixels are."""
    sources: tuple[str, ...] = ()
    """Names of the sets that rows are from; empty where there is one."""
    source_N: Indices = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Number of the set of each row, where there are several."""

    @property
    def labels(self) -> list[Any]:
        """The label of each row."""
        return record_table.labels_of(self.records)

    @property
    def keys(self) -> list[str]:
        """The key of each row, by which duplicates are found."""
        return [record.key for record in self.records]

    def subset(self, keep: npt.NDArray[np.bool_], note: str | None = None) -> RecordSource:
        """The rows that `keep` marks."""
        numbers = np.flatnonzero(keep)
        kept = record_table.taken(self.records, numbers)
        return replace(
            self,
            records=kept,
            inputs=None if self.inputs is None else self.inputs.take(numbers),
            skipped=(note, *self.skipped) if note else self.skipped,
            source_N=self.source_N[keep] if self.sources else self.source_N,
        )


def source_prefixes(sets: Mapping[str, RecordSource]) -> dict[str, str]:
    """The beginning of the places of each set's rows where they stand together; see `named_sets.prefixes`."""
    return named_sets.prefixes({name: each.name for name, each in sets.items()})


def join_sources(sets: Mapping[str, RecordSource]) -> RecordSource:
    """The rows of several sets, which they know by name; of one that has none (``) as they are."""
    parts = list(sets.values())
    if sets.keys() == {""}:
        return parts[0]
    placed = [record_table.prefixed(sets[name].records, prefix) for name, prefix in source_prefixes(sets).items()]
    inputs = [each.inputs for each in parts if each.inputs is not None]
    return replace(
        parts[0],
        name=" + ".join(each.name for each in parts),
        fingerprint=hashlib.sha256("".join(each.fingerprint for each in parts).encode()).hexdigest(),
        records=reduce(record_table.joined, placed),
        skipped=tuple(reason for each in parts for reason in each.skipped),
        inputs=reduce(lambda one, other: one.concatenated(other), inputs) if inputs else None,
        sources=tuple(sets),
        source_N=np.repeat(np.arange(len(parts)), [len(each.records) for each in parts]),
    )


def read(
    source: str,
    config: DataConfig,
    classes: ClassesConfig,
    *,
    limit: int | None = None,
    labelled: bool = True,
    weighted: bool = False,
) -> RecordSource:
    """Read the rows of a file, a folder or a hub data set. Raises DataError: as `convert_rows`; or a column is missing.

    Args:
        limit: Rows to read; None for all.
        labelled: Whether every row must have a label; labels are ignored otherwise.
        weighted: Whether to read how often each row counts, where `config.columns` says in which column.
    """
    config = config if weighted else config.unweighted

    def converter(first: RawRow) -> Callable[[RawRow], LabelledRecord]:
        require_named(source, first, config, (*classes.fields, *classes.labels, WEIGHT, ID), classes, labelled=labelled)
        for name in classes.fields:
            if len(classes.fields) == 1 or classes.kind == "pair":
                _require_column(source, first, config, name)
        require_label_columns(source, first, config, classes, labelled=labelled)
        return partial(_record, config=config, classes=classes, labelled=labelled)

    skipped: list[str] = []
    reads = columns_in_file(config, (*classes.fields, *classes.labels, WEIGHT, ID))
    records = convert_rows(source, converter, config, skipped=skipped, limit=limit, reads=lambda _: reads)
    table = RecordTable.of(records)  # read before what was skipped is known
    return RecordSource(source, fingerprint(source, config), table, tuple(skipped))


def labelled_record(
    row: RawRow, config: DataConfig, classes: ClassesConfig, *, labelled: bool, fields: tuple[str, ...] = ()
) -> LabelledRecord:
    """A row with its label and weight, where it is `labelled`; raises DataError where they are malformed."""
    if not labelled:
        return LabelledRecord(row, fields)
    columns = renamed(row.columns, config.columns)
    label = (
        labels.read_columns(columns, classes) if classes.columns else labels.read(columns.get(classes.label), classes)
    )
    if label is None:
        raise DataError(
            f"`{classes.label}` is empty: the row has no label. Move unlabelled rows to a file of their own."
        )
    named = config.columns.get(WEIGHT)
    return LabelledRecord(
        row, fields, label, 1.0 if named is None else resampling.read_weight(columns.get(WEIGHT), named)
    )


def require_named(
    source: str, row: RawRow, config: DataConfig, known: Sequence[str], classes: ClassesConfig, *, labelled: bool
) -> None:
    """Raise DataError where `data.columns` names a column that nothing reads, or that the first row does not have."""
    for name, in_file in config.columns.items():
        if name not in known:
            raise DataError(f"data.columns: `{name}` is no column that is read here.{did_you_mean(name, known)}")
        if in_file not in row.columns and (labelled or name not in (*classes.labels, ID)):
            raise DataError(
                f"data.columns: {source} has no column `{in_file}`.{did_you_mean(in_file, list(row.columns))}"
            )


def require_label_columns(
    source: str, row: RawRow, config: DataConfig, classes: ClassesConfig, *, labelled: bool
) -> None:
    """Raise DataError where the first row of a source has no label or no weight."""
    if (named := config.columns.get(WEIGHT)) is not None and named not in row.columns:
        raise DataError(f"data.columns: {source} has no column `{named}`.{did_you_mean(named, list(row.columns))}")
    if not labelled:
        return
    if not classes.columns:
        _require_column(source, row, config, classes.label)
    for name in classes.columns:
        if name not in renamed(row.columns, config.columns):
            raise DataError(
                f"classes.columns: {source} has no column `{name}`.{did_you_mean(name, list(row.columns))} Write the "
                "columns that hold 1 where a row has the class."
            )


def _require_column(source: str, row: RawRow, config: DataConfig, name: str) -> None:
    if name not in renamed(row.columns, config.columns):
        if other := next((other for other, in_file in config.columns.items() if in_file == name), None):
            raise DataError(
                f"data.columns: {source} has its `{name}` in the column of that name, which `{other}` takes. Leave "
                f"`{other}` out, or give it a column of its own."
            )
        columns = ", ".join(f"`{each[:60]}`" for each in row.columns) or "none"
        raise DataError(
            f"{source}: has no column `{name}` among its columns {columns}. Write "
            + (
                ("" if ".json" in source else "data.format=label_first where each line begins with its label, or ")
                + "data.labels=FILE where labels are the lines of another file."
                if {*row.columns} == {"text"}
                else f"data.columns='{{{name}: NAME}}' with its name, or classes.text with the columns that the model "
                "reads."
            )
        )


def _record(row: RawRow, *, config: DataConfig, classes: ClassesConfig, labelled: bool) -> LabelledRecord:
    columns = renamed(row.columns, config.columns)
    fields = tuple(_text(columns.get(name), name) for name in classes.fields)
    required = PAIR_FIELDS if classes.kind == "pair" else classes.fields if len(fields) == 1 else ()
    for name, text in zip(classes.fields, fields, strict=True):
        if name in required and not text.strip():
            raise DataError(f"`{name}` is empty.")
    if not any(text.strip() for text in fields):
        raise DataError(f"{', '.join(f'`{name}`' for name in classes.fields)} are all empty.")
    return labelled_record(row, config, classes, labelled=labelled, fields=fields)


def _text(value: Any, name: str) -> str:
    if value is None or value != value:
        return ""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise DataError(f"`{name}` must be text, found {excerpt(value)}.")
    return value


class NamedColumns(NamedTuple):
    """A row, with its columns by the names that a reader wants."""

    row: RawRow
    columns: Mapping[str, Any]


def named_columns(row: RawRow, asked: DataConfig, own: DataConfig) -> dict[str, Any]:
    """The columns of a row by the names that another reader wants: as `data.columns` of its `own` configuration says,
    else as that of the one with which the row was read."""
    columns = row.columns
    named = {wanted: columns[column] for wanted, column in own.columns.items() if column in columns}
    return {**columns, **renamed(columns, asked.columns), **named}


class RowReader(Protocol):
    """Reads labelled rows, and converts them to inputs of one backbone."""

    @property
    def data(self) -> DataConfig:
        """How files are read."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that the model reads, by the names that the configuration uses."""

    @property
    def title(self) -> str:
        """Column of a table of predictions that says what was read: `text` or `image`."""

    @property
    def file(self) -> str:
        """File that stands beside an adapter, from which this reader is made again."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Decides how large the vocabulary is; None for pictures."""

    def read(
        self,
        source: str,
        *,
        limit: int | None = None,
        labelled: bool = True,
        weighted: bool = False,
        columns: Mapping[str, str] | None = None,
    ) -> RecordSource:
        """Read the rows of a file, a folder or a hub data set. Raises DataError: rows are malformed, or a column is
        missing.

        Args:
            columns: How columns are renamed; None: as `data.columns` says.
            limit: Rows to read; None for all.
            labelled: Whether every row must have a label; labels are ignored otherwise.
            weighted: Whether to read how often each counts, where `data.columns` says in which column; else once each.
        """

    def reread(self, source: str, fingerprint: str, rows: Sequence[NamedColumns]) -> RecordSource:
        """The rows that another reader read, as this one reads them, without labels."""

    def inputs(self, source: RecordSource) -> RowInputs:
        """Each row as the model reads it."""

    def describe(self, record: LabelledRecord) -> str:
        """A row in words: its whole text, or the name of its picture."""

    def rendered(self, inputs: RowInputs, index: int) -> str:
        """Row `index` as the model reads it, in words."""

    def duplicates(self, sources: Sequence[RecordSource], part_N: Indices | None = None) -> DuplicateClusters:
        """Near-duplicates among the rows of all sources together, in their order. `part_N`: the part of the split that
        each row is in: only those in different parts are looked for; None: all."""

    def same_positions(self, other: RowReader) -> bool:
        """Whether `other` cuts each row into the same tokens, or brings pictures to the same size."""

    def as_read_by(self, other: RowReader, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Inputs of this reader's model for that of `other`, which has the same positions."""

    def save(self, folder: Path) -> None:
        """Write `file` into `folder`."""
