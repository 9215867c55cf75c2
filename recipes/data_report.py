"""`workbench data`: a page on the rows of a recipe, and a table of the rows that rules of quality flag."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from transformers import PreTrainedTokenizerBase

from workbench.config import DataConfig, RunConfig, distill_expansion, sweep_expansion, tasks
from workbench.config.distill_config import TEACHER
from workbench.data import starter
from workbench.data.batching import Indices
from workbench.data.labelled import labelled_data, labels
from workbench.data.labelled.labels import Label
from workbench.data.labelled.records import RecordSource
from workbench.data.labelled.row_reader import RowReader
from workbench.data.labelled.text_reader import TextReader
from workbench.data.text import formats, tokenized
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.quality import row_texts, survey
from workbench.data.text.quality.row_texts import RowText
from workbench.data.text.quality.survey import Findings, SourceRows
from workbench.data.text.row_encoder import row_encoder
from workbench.data.text.token_masking import MlmEncoder
from workbench.errors import ConfigError, DataError
from workbench.evaluation import scores
from workbench.models import backbones, output_heads, row_readers
from workbench.recipes import distill
from workbench.recipes.sft import read_template
from workbench.report import data_page
from workbench.runs import files

PAGE, FLAGS = "data.html", "flags.parquet"
PERPLEXITIES = 1000
"""Rows of a source, evenly spaced, whose perplexity is computed."""

Encoder = ChatEncoder | MlmEncoder


class DataReport(NamedTuple):
    """Findings on the rows of a recipe, and the files that hold them."""

    config: RunConfig
    found: list[Findings]
    """Training rows first, then held-out and test rows where the recipe names files of them."""
    page: Path
    flags: Path


def write(config: RunConfig, out: Path, *, name: str = "", perplexity: bool = False) -> DataReport:
    """Read the rows that a recipe names and write data.html and flags.parquet into the folder `out`.

    Rows that a run would refuse are reported too; nothing is changed.

    Args:
        name: Title of the page; the recipe's where it is empty.
        perplexity: Whether the backbone reads a sample of the rows, which takes longest.

    Raises:
        ConfigError: The recipe has no perplexity.
        DataError: A file cannot be read, or has no usable row.
    """
    config = _plain(config)
    if perplexity and config.recipe not in ("sft", "mlm"):
        raise ConfigError(
            f"--perplexity is measured on the tokens that a recipe learns, and recipe={config.recipe} learns labels. "
            "Leave it out."
        )
    files.require_writable(out / PAGE)
    lenient = config.model_copy(update={"data": config.data.model_copy(update={"on_bad_row": "skip"})})
    read = _labelled(lenient) if config.recipe in ("classify", "crossval") else _text(lenient, perplexity=perplexity)
    report = DataReport(config, survey.examine(read), out / PAGE, out / FLAGS)
    buffer = io.BytesIO()
    _table(report.found).to_parquet(buffer)
    files.write_bytes(report.flags, buffer.getvalue())
    files.write_bytes(report.page, data_page.page(name or config.recipe, config.data, report.found).encode())
    return report


def _plain(config: RunConfig) -> RunConfig:
    """The configuration of the recipe that reads the rows; a student reads them as the backbone it is made of does."""
    if config.recipe == "sweep":
        return sweep_expansion.shared(config)
    if config.recipe != "distill":
        return config
    plain = distill_expansion.as_plain_run(config)
    teacher = distill.find_teacher(config) if config.model.id == TEACHER else None
    return plain if teacher is None else plain.model_copy(update={"model": teacher.model})


def _sources(config: RunConfig) -> Iterator[tuple[str, DataConfig]]:
    """Title of each file that the recipe names, and the settings that read it as training rows."""
    data = config.data
    for name, own in data.training_files.items():
        yield _titled("Train", name), own
    for title, named in {"Held-out": data.held_out_files, "Test": data.test_files}.items():
        for name, path in named.items():
            yield _titled(title, name), data.model_copy(update={"train": path, "limit": None})


def _titled(title: str, name: str) -> str:
    return f"{title}: {name}" if name else title


def _text(config: RunConfig, *, perplexity: bool) -> list[SourceRows]:
    tokenizer = backbones.tokenizer(config.model)
    template = row_encoder(config, backbones.hub_config(config.model), tokenizer, template=read_template(config))
    read = [_encoded(own, template, title) for title, own in _sources(config)]
    if not perplexity:
        return read
    found = _perplexities(config, tokenizer, template)
    return [replace(each, perplexities=_numbered(each, found[each.title])) for each in read]


def _numbered(read: SourceRows, by_place: Mapping[str, float]) -> dict[int, float]:
    """Perplexities by the numbers of the rows."""
    return {number: by_place[row.place] for number, row in enumerate(read.rows) if row.place in by_place}


def _encoded(config: DataConfig, template: Encoder, title: str) -> SourceRows:
    """Rows with the tokens of their longest sequence; those that have nothing to learn are unreadable."""
    skipped: list[str] = []
    rows: list[RowText] = []
    tokens: list[int] = []
    for example in formats.read(starter.resolve(config.train), config, skipped=skipped, limit=config.limit):
        try:
            parts = template.expanded(example, loss_on=config.loss_on)
            lengths = [len(template.encode(part, loss_on=config.loss_on).input_ids) for part in parts]
        except DataError as error:
            skipped.append(str(error))
            continue
        rows.append(row_texts.of_example(example))
        tokens.append(max(lengths, default=0))
    return SourceRows(title, config.train, rows, np.asarray(tokens, dtype=np.int64), unreadable=tuple(skipped))


def _perplexities(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, template: Encoder
) -> dict[str, dict[str, float]]:
    """Perplexity of the supervised tokens of a sample of each source's rows, by file and row."""
    backbone = backbones.load(config.model, tokenizer, task=tasks.of(config))
    head = output_heads.find(backbone.model, backbone.model)
    found = {}
    for title, own in _sources(config):
        rows = tokenized.read(own.train, own, tokenizer, template, limit=own.limit)
        chosen = np.unique(np.linspace(0, len(rows) - 1, num=min(PERPLEXITIES, len(rows)), dtype=np.int64))
        sample = rows.subset(chosen)
        losses = scores.row_likelihoods(backbone.model, head, sample)
        found[title] = {sample.place(row): float(np.exp(loss / count)) for row, (loss, _, count) in losses.items()}
    return found


def _labelled(config: RunConfig) -> list[SourceRows]:
    reader = row_readers.of_backbone(config)
    return [
        _records(config, reader, title, reader.read(own.train, limit=own.limit)) for title, own in _sources(config)
        if title != "Held-out" or config.recipe == "classify"
    ]  # fmt: skip


def _records(config: RunConfig, reader: RowReader, title: str, source: RecordSource) -> SourceRows:
    numeric = config.classes.kind == "number"
    is_text = isinstance(reader, TextReader)
    return SourceRows(
        title,
        source.name,
        [labelled_data.row_text(record) if is_text else RowText(record.place, "") for record in source.records],
        _lengths(reader, source) if isinstance(reader, TextReader) else None,
        labels=None if numeric else [_names(record.label) for record in source.records],
        numbers=[float(label) for label in source.labels] if numeric else None,
        unreadable=source.skipped,
        clusters=reader.duplicates([source]) if not is_text or config.recipe == "crossval" else None,
    )


def _names(label: Label | None) -> tuple[str, ...]:
    return tuple(labels.classes_of(label))


def _lengths(reader: TextReader, source: RecordSource) -> Indices:
    texts = [reader.describe(record) for record in source.records]
    return np.asarray([len(ids) for ids in reader.tokenizer(texts, verbose=False)["input_ids"]], dtype=np.int64)


def _table(found: list[Findings]) -> pd.DataFrame:
    """A line for each flag: which rows it is of, file and row, rule, value, note."""
    columns: Mapping[str, list[object]] = {
        "split": [each.read.title for each in found for _ in each.flags],
        "row": [flag.place for each in found for flag in each.flags],
        "rule": [flag.rule for each in found for flag in each.flags],
        "value": [flag.value for each in found for flag in each.flags],
        "note": [flag.note for each in found for flag in each.flags],
    }
    return pd.DataFrame(columns)
