"""How labelled rows are read for one backbone: texts by its tokenizer, pictures by its picture format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from workbench.data.folds.duplicates import DuplicateClusters
from workbench.data.labelled.record_table import LabelledRecord
from workbench.data.labelled.records import RecordSource
from workbench.data.labelled.row_inputs import RowInputs
from workbench.data.rows import RawRow


class NamedColumns(NamedTuple):
    """A row, with its columns by the names that a reader wants."""

    row: RawRow
    columns: Mapping[str, Any]


class RowReader(Protocol):
    """Reads labelled rows, and converts them to inputs of one backbone."""

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
        """Read the rows of a file, a folder or a hub data set.

        Args:
            columns: How columns are renamed; None: as `data.columns` says.
            limit: Rows to read; None for all.
            labelled: Whether every row must have a label; labels are ignored otherwise.
            weighted: Whether to read how often each counts, where `data.columns` says in which column; else once each.

        Raises:
            DataError: Rows are malformed, or a column is missing.
        """

    def reread(self, source: str, fingerprint: str, rows: Sequence[NamedColumns]) -> RecordSource:
        """The rows that another reader read, as this one reads them, without labels."""

    def inputs(self, source: RecordSource) -> RowInputs:
        """Each row as the model reads it."""

    def describe(self, record: LabelledRecord) -> str:
        """A row in words: its whole text, or the name of its picture."""

    def rendered(self, inputs: RowInputs, index: int) -> str:
        """Row `index` as the model reads it, in words."""

    def duplicates(self, sources: Sequence[RecordSource]) -> DuplicateClusters:
        """Near-duplicates among the rows of all sources together, in their order."""

    def same_positions(self, other: RowReader) -> bool:
        """Whether `other` cuts each row into the same tokens, or brings pictures to the same size."""

    def as_read_by(self, other: RowReader, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Inputs of this reader's model for that of `other`, which has the same positions."""

    def save(self, folder: Path) -> None:
        """Write `file` into `folder`."""
