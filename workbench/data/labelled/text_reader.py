"""Reads labelled rows of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from workbench.config import DataConfig
from workbench.config.sections.classes_config import ClassesConfig
from workbench.config.sections.folds_config import DuplicatesConfig
from workbench.data.folds import duplicates
from workbench.data.folds.duplicates import DuplicateClusters
from workbench.data.labelled import records
from workbench.data.labelled.record_table import LabelledRecord, RecordTable
from workbench.data.labelled.records import RecordSource
from workbench.data.labelled.row_inputs import RowInputs
from workbench.data.labelled.row_reader import NamedColumns, RowReader
from workbench.data.labelled.text_fields import FieldTokenizer
from workbench.data.labelled.token_rows import TokenRows
from workbench.data.rows import excerpt
from workbench.errors import DataError


@dataclass(frozen=True)
class TextReader:
    """Reads columns of text as `classes` puts them together; see `RowReader`."""

    tokenizer: PreTrainedTokenizerBase
    data: DataConfig
    classes: ClassesConfig
    near: DuplicatesConfig
    """When two texts are near-duplicates."""
    title: str = "text"
    file: str = "tokenizer.json"

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the template."""
        return self.classes.fields

    @property
    def encoder(self) -> FieldTokenizer:
        """Tokenises rows of columns."""
        return FieldTokenizer(self.tokenizer, self.classes, max_tokens=self.data.max_tokens)

    def read(
        self,
        source: str,
        *,
        limit: int | None = None,
        labelled: bool = True,
        weighted: bool = False,
        columns: Mapping[str, str] | None = None,
    ) -> RecordSource:
        """Read the rows of a file, a folder or a hub data set; raises what `records.read` does."""
        data = self.data.with_columns(columns)
        return records.read(source, data, self.classes, limit=limit, labelled=labelled, weighted=weighted)

    def reread(self, source: str, fingerprint: str, rows: Sequence[NamedColumns]) -> RecordSource:
        """The rows that another reader read, as this one reads them, without labels."""
        read = (
            LabelledRecord(row, tuple(_text(columns.get(name), row.place, name) for name in self.columns))
            for row, columns in rows
        )
        return RecordSource(source, fingerprint, RecordTable.of(read))

    def inputs(self, source: RecordSource) -> TokenRows:
        """Tokens of each row."""
        fields, places = (record.fields for record in source.records), (record.place for record in source.records)
        return TokenRows(self.encoder.encode(fields, places))

    def describe(self, record: LabelledRecord) -> str:
        """The whole text of a row."""
        return self.encoder.text(record.fields)

    def rendered(self, inputs: RowInputs, index: int) -> str:
        """The tokens of a row as text, special ones too."""
        assert isinstance(inputs, TokenRows)
        return str(self.tokenizer.decode(inputs.encoded[index].input_ids))

    def duplicates(self, sources: Sequence[RecordSource]) -> DuplicateClusters:
        """Near-duplicates among the texts of all sources together."""
        texts = [key for source in sources for key in source.keys]
        threshold = self.near.cutoff(pictures=False)
        return duplicates.find(texts, threshold=threshold, shingle=self.near.shingle, size=self.near.length)

    def same_positions(self, other: RowReader) -> bool:
        """Whether `other` has the same vocabulary."""
        return other.tokenizer is not None and other.tokenizer.get_vocab() == self.tokenizer.get_vocab()

    def as_read_by(self, other: RowReader, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same tokens."""
        return inputs

    def save(self, folder: Path) -> None:
        """Write the tokenizer into `folder`."""
        self.tokenizer.save_pretrained(folder)


def _text(value: Any, place: str, name: str) -> str:
    if value is None or value != value:
        return ""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise DataError(f"{place}: the teacher reads `{name}`, which must be text, found {excerpt(value)}.")
    return str(value)
