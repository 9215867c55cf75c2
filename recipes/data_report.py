"""`workbench data`: a page on the rows of a recipe, and a table of the rows that rules of quality flag."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from workbench.config import DataConfig, RunConfig
from workbench.config.expansions import distill_expansion, search_expansion, sweep_expansion
from workbench.config.sections.distill_config import TEACHER
from workbench.data import starter
from workbench.data.batching import Indices
from workbench.data.embedding import pair_records
from workbench.data.folds.duplicates import DuplicateClusters
from workbench.data.labelled import labelled_data, labels
from workbench.data.labelled.labels import Label
from workbench.data.labelled.records import RecordSource, RowReader
from workbench.data.labelled.text_reader import TextReader
from workbench.data.text import formats, prompts
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.preference_pairs import PreferenceEncoder
from workbench.data.text.prompts import PromptEncoder
from workbench.data.text.quality import rules, survey
from workbench.data.text.quality.rules import RowText
from workbench.data.text.quality.survey import Findings, SourceRows
from workbench.data.text.row_encoder import row_encoder
from workbench.data.text.stepwise import StepEncoder
from workbench.data.text.token_masking import MlmEncoder
from workbench.errors import ConfigError, DataError
from workbench.models import backbones, row_readers
from workbench.recipes import row_perplexities
from workbench.recipes.distillation import distill
from workbench.recipes.row_perplexities import SampleSize
from workbench.recipes.single import streamed_rows
from workbench.recipes.text.sft import read_template
from workbench.report import data_page
from workbench.runs import files

PAGE, FLAGS, PERPLEXITIES = "data.html", "flags.parquet", "perplexity.parquet"

Encoder = ChatEncoder | MlmEncoder | PromptEncoder | PreferenceEncoder | StepEncoder


class DataReport(NamedTuple):
    """Findings on the rows of a recipe, and the files that hold them."""

    config: RunConfig
    findings: list[Findings]
    """Training rows of each source first, then held-out and test rows where the recipe names files of them."""
    page: Path
    flags: Path


def write(config: RunConfig, out: Path, *, name: str = "", perplexity: str = "auto") -> DataReport:
    """Read the rows that a recipe names and write data.html and flags.parquet into the folder `out`.

    Where the backbone reads rows, there is perplexity.parquet too: split, row, perplexity.

    Rows that a run would refuse are reported too; nothing is changed.

    Args:
        name: Title of the page; the recipe's where it is empty.
        perplexity: Rows of each file that the backbone reads: `auto`, as many as are cheap, `all`, `off`, or a number.

    Raises:
        ConfigError: `perplexity` is none of these, or the recipe has none.
        DataError: A file cannot be read, or has no usable row.
    """
    config = _plain(streamed_rows.local(config))
    size = row_perplexities.sample_size(perplexity, config)
    files.require_writable(out / PAGE)
    lenient = config.model_copy(update={"data": config.data.model_copy(update={"on_bad_row": "skip"})})
    readers = {"classify": _labelled, "crossval": _labelled, "embed": _embedded, "rerank": _embedded}
    read = readers[config.recipe](lenient) if config.recipe in readers else _text(lenient, size)
    report = DataReport(config, survey.examine(read), out / PAGE, out / FLAGS)
    files.write_bytes(report.flags, _table(report.findings).to_parquet())
    if any(each.read.perplexities for each in report.findings):
        files.write_bytes(out / PERPLEXITIES, _perplexity_table(report.findings).to_parquet())
    files.write_bytes(report.page, data_page.page(name or config.recipe, config.data, report.findings).encode())
    return report


def _plain(config: RunConfig) -> RunConfig:
    """The configuration of the recipe that reads the rows; a student reads them as the backbone it is made of does."""
    if config.recipe == "search":
        return search_expansion.shared(config)
    if config.recipe == "fleet":
        of: str = config.fleet.of
        raise ConfigError(
            f"recipe=fleet: each member has rows of its own. Write recipe={of} fleet={{}} data.train=FILE."
        )
    if config.recipe == "sweep":
        return sweep_expansion.shared(config)
    if config.recipe != "distill":
        return config
    plain = distill_expansion.as_plain_run(config)
    teacher = distill.find_teacher(config) if config.model.id == TEACHER else None
    return plain if teacher is None else plain.model_copy(update={"model": teacher.model})


class _Source(NamedTuple):
    """A file that a recipe names."""

    title: str
    config: DataConfig
    """Settings that read it as training rows."""
    trains: bool


def _sources(config: RunConfig) -> Iterator[_Source]:
    """Yield each file that the recipe names."""
    data = config.data
    for name, own in data.training_files.items():
        yield _Source(_titled("Train", name), own, True)
    for title, named in {"Held-out": data.held_out_files, "Test": data.test_files}.items():
        for name, path in named.items():
            yield _Source(_titled(title, name), data.model_copy(update={"train": path, "limit": None}), False)


def _titled(title: str, name: str) -> str:
    return f"{title}: {name}" if name else title


def _text(config: RunConfig, size: SampleSize | None) -> list[SourceRows]:
    tokenizer = backbones.tokenizer(config.model)
    base = row_encoder(config, backbones.hub_config(config.model), tokenizer, template=read_template(config))
    template = _as_learnt(base, config)
    sources = list(_sources(config))
    read = [_encoded(each, template) for each in sources]
    if size is None:
        return read
    by_title, note = row_perplexities.measure(config, [each[:2] for each in sources], tokenizer, base, size)
    read[0] = replace(read[0], notes=(note,) if note else ())
    return [replace(each, perplexities=_numbered(each, by_title.get(each.title, {}))) for each in read]


def _as_learnt(base: ChatEncoder | MlmEncoder, config: RunConfig) -> Encoder:
    """The encoder of the rows of a recipe, which may learn from prompts alone, or from answers that are compared."""
    if config.recipe not in ("reinforce", "prefer", "reward"):
        return base
    assert isinstance(base, ChatEncoder)
    if config.recipe == "reward" and config.reward.kind == "process":
        return StepEncoder(base, config.reward.separator)
    return PromptEncoder(base) if config.recipe == "reinforce" else PreferenceEncoder(base)


def _numbered(read: SourceRows, by_place: Mapping[str, float]) -> dict[int, float]:
    """Perplexities by the numbers of the rows."""
    return {number: by_place[row.place] for number, row in enumerate(read.rows) if row.place in by_place}


def _encoded(source: _Source, template: Encoder) -> SourceRows:
    """Rows with the tokens of their longest sequence; those that have nothing to learn are unreadable."""
    config = source.config
    skipped: list[str] = []
    rows: list[RowText] = []
    tokens: list[int] = []
    examples = formats.read(
        starter.resolve(config.train),
        config,
        skipped=skipped,
        limit=config.limit,
        conversion=template.conversion,
        reader=template.reader,
    )
    for example in examples:
        try:
            parts = template.expanded(example, loss_on=config.loss_on)
            lengths = [len(template.encode(part, loss_on=config.loss_on).input_ids) for part in parts]
        except DataError as error:
            skipped.append(str(error))
            continue
        visible_example = prompts.without_answer(example) if isinstance(template, PromptEncoder) else example
        rows.append(rules.row_text_of_example(visible_example))
        tokens.append(max(lengths, default=0))
    tokens_N = np.asarray(tokens, dtype=np.int64)
    return SourceRows(source.title, config.train, rows, tokens_N, source.trains, unreadable=tuple(skipped))


def _embedded(config: RunConfig) -> list[SourceRows]:
    """Rows of texts that are compared, with the tokens of the longest."""
    tokenizer, source_rows = backbones.tokenizer(config.model), []
    for title, own, trains in _sources(config):
        source = pair_records.read(own.train, own, limit=own.limit)
        records = source.records
        ids = iter(tokenizer([text for record in records for text in record.texts], verbose=False)["input_ids"])
        tokens_N = [max(len(next(ids)) for _ in record.texts) for record in records]
        source_rows.append(
            SourceRows(
                title,
                source.name,
                [rules.row_text_of_texts(record.place, record.texts) for record in records],
                np.asarray(tokens_N, dtype=np.int64),
                trains,
                labels=[(record.label,) for record in records] if source.form == "labelled" else None,
                numbers=[record.score for record in records] if source.form == "scored" else None,
                unreadable=source.skipped,
            )
        )
    return source_rows


def _labelled(config: RunConfig) -> list[SourceRows]:
    reader = row_readers.of_backbone(config)
    named = [each for each in _sources(config) if each.title != "Held-out" or config.recipe == "classify"]
    sources = [reader.read(each.config.train, limit=each.config.limit, columns=each.config.columns) for each in named]
    clusters = _clusters(config, reader, named, sources)
    triples = zip(named, sources, clusters, strict=True)
    return [_records(config, reader, each, source, own) for each, source, own in triples]


def _clusters(
    config: RunConfig, reader: RowReader, named: Sequence[_Source], sources: Sequence[RecordSource]
) -> Sequence[DuplicateClusters | None]:
    """Duplicates among the rows of all training sources, and of each other one; among pictures of all sources."""
    count = len(sources)
    if isinstance(reader, TextReader):
        if config.recipe != "crossval":
            return [None] * count
        count = sum(each.trains for each in named)  # which stand first
    groups = [sources[:count], *([each] for each in sources[count:])]
    return [clusters for group in groups for clusters in _compared(reader, group)]


def _compared(reader: RowReader, group: Sequence[RecordSource]) -> list[DuplicateClusters]:
    """Duplicates among the rows of several sources, of each source."""
    together = reader.duplicates(group)
    source_N = np.repeat(np.arange(len(group)), [len(each.records) for each in group])
    return [together.subset(source_N == number) for number in range(len(group))]


def _records(
    config: RunConfig, reader: RowReader, named: _Source, source: RecordSource, clusters: DuplicateClusters | None
) -> SourceRows:
    numeric = config.classes.kind == "number"
    is_text = isinstance(reader, TextReader)
    return SourceRows(
        named.title,
        source.name,
        [labelled_data.row_text(record) if is_text else RowText(record.place, "") for record in source.records],
        _lengths(reader, source) if isinstance(reader, TextReader) else None,
        named.trains,
        labels=None if numeric else [_names(record.label) for record in source.records],
        numbers=[float(label) for label in source.labels] if numeric else None,
        unreadable=source.skipped,
        clusters=clusters,
    )


def _names(label: Label | None) -> tuple[str, ...]:
    return tuple(labels.classes_of(label))


def _lengths(reader: TextReader, source: RecordSource) -> Indices:
    texts = [reader.describe(record) for record in source.records]
    return np.asarray([len(ids) for ids in reader.tokenizer(texts, verbose=False)["input_ids"]], dtype=np.int64)


def _perplexity_table(findings: list[Findings]) -> pd.DataFrame:
    """A line for each row that the backbone read."""
    lines = [
        (each.read.title, each.read.rows[row].place, value)
        for each in findings
        for row, value in each.read.perplexities.items()
    ]
    return pd.DataFrame(lines, columns=["split", "row", "perplexity"])


def _table(findings: list[Findings]) -> pd.DataFrame:
    """A line for each flag: which rows it is of, file and row, rule, value, note, and the text of the row, cut."""
    columns: Mapping[str, list[object]] = {
        "split": [each.read.title for each in findings for _ in each.flags],
        "row": [flag.place for each in findings for flag in each.flags],
        "rule": [flag.rule for each in findings for flag in each.flags],
        "value": [flag.value for each in findings for flag in each.flags],
        "note": [flag.note for each in findings for flag in each.flags],
        "text": [each.text(flag)[: data_page.KEPT] for each in findings for flag in each.flags],
    }
    return pd.DataFrame(columns)
