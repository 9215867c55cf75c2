"""`workbench data`: a page on the rows of a recipe, and a table of the rows that rules of quality flag."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from transformers import PreTrainedTokenizerBase

from workbench.config import DataConfig, RunConfig, model_heads
from workbench.config.sections.distill_config import TEACHER
from workbench.data.batching import Indices, evenly_spaced
from workbench.data.text import tokenized
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.quality import survey
from workbench.data.text.quality.survey import Findings, SourceRows
from workbench.data.text.row_encoder import row_encoder
from workbench.data.text.token_masking import MlmEncoder
from workbench.errors import ConfigError, WorkbenchError
from workbench.evaluation import adversarial_validation
from workbench.evaluation import perplexity as perplexities
from workbench.evaluation.adversarial_validation import RowShift
from workbench.evaluation.frozen_features import LARGEST
from workbench.models import backbones, output_heads, picture_processor
from workbench.recipes.load import Recipe, load
from workbench.recipes.over import distill
from workbench.recipes.single import streamed_rows
from workbench.recipes.task import RowFile, implementation
from workbench.recipes.tasks.sft.text_run import read_template
from workbench.report import data_page
from workbench.runs import files

MOST = 1000
"""Rows of a file that `auto` reads at most."""
WORK = {"cpu": 1e12, "cuda": 1e15}
"""Floating-point operations of some seconds, by device, that `auto` spends."""


class Perplexities(NamedTuple):
    """Perplexity of the supervised tokens of some rows of each file: by its title, then by file and row."""

    by_row: dict[str, dict[str, float]]
    note: str = ""
    """Why there is none, where some were to be expected."""


class SampleSize(NamedTuple):
    """Rows of each file that are read."""

    rows: int | None = None
    """At most so many, evenly spaced; None: all."""
    cheap: bool = False
    """Fewer where the backbone is large, and none where it would have to be fetched."""


def sample_size(wanted: str, config: RunConfig) -> SampleSize | None:
    """The sample that `--perplexity` asks for; None where there is to be none.

    Raises:
        ConfigError: It is none of auto, all, off and a number, or the recipe learns no tokens.
    """
    known = {"auto": SampleSize(MOST, cheap=True), "all": SampleSize(), "off": None}
    if wanted not in known and not (wanted.isdecimal() and int(wanted)):
        raise ConfigError(f"--perplexity={wanted}: write auto, all, off, or a number of rows such as 500.")
    if config.task.tokens:
        return known[wanted] if wanted in known else SampleSize(int(wanted))
    if wanted not in ("auto", "off"):
        raise ConfigError(
            f"--perplexity is measured on the tokens that a recipe learns, and recipe={config.recipe} learns labels. "
            "Leave it out."
        )
    return None


def row_perplexities(
    config: RunConfig,
    sources: Sequence[tuple[str, DataConfig]],
    tokenizer: PreTrainedTokenizerBase,
    template: ChatEncoder | MlmEncoder,
    size: SampleSize,
) -> Perplexities:
    """Perplexities of a sample of each file, by the backbone.

    Args:
        sources: Title of each file, and the settings that read it as training rows.
    """
    try:
        work = None
        if size.cheap:
            parameters = sum(
                each.numel() for each in backbones.skeleton(config.model, task=model_heads.of(config)).parameters()
            )
            if parameters > LARGEST or not backbones.weights_are_local(config.model):
                why = "is not on this machine" if parameters <= LARGEST else f"has over {LARGEST // 10**6} M parameters"
                return Perplexities(
                    {}, f"Perplexities were not measured: {config.model.id} {why}. Write --perplexity 500."
                )
            work = WORK[backbones.device().type] / (2 * parameters) / len(sources)
        backbone = backbones.load(config.model, tokenizer, task=model_heads.of(config))
        head = output_heads.find(backbone.model, backbone.model)
        by_title = {}
        for title, own in sources:
            rows = tokenized.read(own.train, own, tokenizer, template, limit=own.limit)
            sample = rows.subset(_spread(rows.lengths, size.rows, work))
            losses = perplexities.row_likelihoods(backbone.model, head, sample)
            sums: dict[str, tuple[float, int]] = {}
            for row, (loss, _, count) in enumerate(losses):
                place = tokenized.example_of(sample.place(row))
                before = sums.get(place, (0.0, 0))
                sums[place] = before[0] + loss, before[1] + count
            by_title[title] = {place: float(np.exp(loss / count)) for place, (loss, count) in sums.items()}
        return Perplexities(by_title)
    except WorkbenchError as error:
        if not size.cheap:
            raise
        return Perplexities({}, f"Perplexities were not measured: {error}")


def _spread(length_N: Indices, most: int | None, work: float | None) -> Indices:
    """Numbers of at most `most` rows, evenly spaced, fewer where their tokens would be more than `work`."""
    count = len(length_N) if most is None else min(most, len(length_N))
    if work is not None:
        count = max(1, min(count, int(work / length_N.mean())))
    return evenly_spaced(len(length_N), count)


PAGE, FLAGS, PERPLEXITIES, SHIFT = "data.html", "flags.parquet", "perplexity.parquet", "shift.json"


class DataReport(NamedTuple):
    """Findings on the rows of a recipe, and the files that hold them."""

    config: RunConfig
    findings: list[Findings]
    """Training rows of each source first, then held-out and test rows where the recipe names files of them."""
    page: Path
    flags: Path
    shifts: tuple[RowShift, ...]
    """Whether rows of each held-out and test file can be told from training rows."""


def data_report(
    recipe: Recipe,
    overrides: Sequence[str] = (),
    *,
    out: Path | str = "data-report",
    perplexity: str = "auto",
    name: str = "",
) -> DataReport:
    """Read the rows that a recipe names and write data.html and flags.parquet into the folder `out`.

    Where the backbone reads rows, there is perplexity.parquet too: split, row, perplexity.

    Rows that a run would refuse are reported too; nothing is changed.

    Args:
        recipe: A configuration, a YAML file, or the name of a shipped recipe.
        overrides: `key=value` words on top of a file or name.
        out: Folder of the page and the tables.
        perplexity: Rows of each file that the backbone reads: `auto`, as many as are cheap, `all`, `off`, or a number.
        name: Title of the page; the recipe's where it is empty.

    Returns:
        The `findings` on each file, the paths of `page` and `flags`, and the `shifts` of held-out and test files.

    Raises:
        ConfigError: `perplexity` is none of these, or the recipe has none.
        DataError: A file cannot be read, or has no usable row.

    Examples:
        >>> import pandas, workbench
        >>> report = workbench.data_report("sft/quickstart", ["data.limit=40"], out="rows", perplexity="off")
        >>> report.page.name, [len(each.read.rows) for each in report.findings]
        ('data.html', [40, 200])
        >>> list(pandas.read_parquet(report.flags).columns)
        ['split', 'row', 'rule', 'value', 'note', 'text']
    """
    config, out = _plain(streamed_rows.local(load(recipe, overrides))), Path(out)
    size = sample_size(perplexity, config)
    files.require_writable(out / PAGE)
    lenient = config.model_copy(update={"data": config.data.model_copy(update={"on_bad_row": "skip"})})
    sources = list(_sources(lenient))
    read = implementation(lenient).survey(lenient, sources)
    if size is not None:
        tokenizer = backbones.tokenizer(lenient.model)
        hub = backbones.hub_config(lenient.model)
        processor = picture_processor.of(lenient, hub)
        base = row_encoder(lenient, hub, tokenizer, template=read_template(lenient), processor=processor)
        by_title, note = row_perplexities(lenient, [each[:2] for each in sources], tokenizer, base, size)
        read[0] = replace(read[0], notes=(note,) if note else ())
        read = [replace(each, perplexities=_numbered(each, by_title.get(each.title, {}))) for each in read]
    trained = [each for each in read if each.trains and len(each.rows)]
    shifts = [
        adversarial_validation.compare(trained, each, seed=config.seed)
        for each in read
        if trained and not each.trains and len(each.rows)
    ]
    report = DataReport(config, survey.examine(read), out / PAGE, out / FLAGS, tuple(shifts))
    told = [
        each._asdict() | {"differences": [own._asdict() for own in each.differences], "verdict": each.sentence}
        for each in shifts
    ]
    files.write_json(out / SHIFT, {"sources": told})
    columns: Mapping[str, list[object]] = {
        "split": [each.read.title for each in report.findings for _ in each.flags],
        "row": [flag.place for each in report.findings for flag in each.flags],
        "rule": [flag.rule for each in report.findings for flag in each.flags],
        "value": [flag.value for each in report.findings for flag in each.flags],
        "note": [flag.note for each in report.findings for flag in each.flags],
        "text": [each.text(flag)[: data_page.KEPT] for each in report.findings for flag in each.flags],
    }
    files.write_bytes(report.flags, pd.DataFrame(columns).to_parquet())
    if any(each.read.perplexities for each in report.findings):
        lines = [
            (each.read.title, each.read.rows[row].place, value)
            for each in report.findings
            for row, value in each.read.perplexities.items()
        ]
        files.write_bytes(out / PERPLEXITIES, pd.DataFrame(lines, columns=["split", "row", "perplexity"]).to_parquet())
    files.write_bytes(
        report.page, data_page.page(name or config.recipe, config.data, report.findings, report.shifts).encode()
    )
    return report


def _plain(config: RunConfig) -> RunConfig:
    """The configuration of the task that reads the rows; a student reads them as the backbone it is made of does."""
    over = config.over
    if over is not None and config.reader != config.task:
        return config.model_copy(update={"recipe": config.reader.name, "of": None})
    if over is None or over.members is None or not config.has_members:
        return config
    if not over.ships:
        raise ConfigError(
            f"recipe={config.recipe}: each member has rows of its own. Write recipe={config.task.name} "
            f"{config.recipe}={{}} data.train=FILE."
        )
    plain: RunConfig = over.members(config)[0].model_copy(update={"seed": config.seed})
    teacher = distill.find_teacher(config) if config.model.id == TEACHER else None
    return plain if teacher is None else plain.model_copy(update={"model": teacher.model})


def _sources(config: RunConfig) -> Iterator[RowFile]:
    data = config.data
    for name, own in data.training_files.items():
        yield RowFile(_titled("Train", name), own, True)
    for title, named in {"Held-out": data.held_out_files, "Test": data.test_files}.items():
        for name, path in named.items():
            yield RowFile(_titled(title, name), data.model_copy(update={"train": path, "limit": None}), False)


def _titled(title: str, name: str) -> str:
    return f"{title}: {name}" if name else title


def _numbered(read: SourceRows, by_place: Mapping[str, float]) -> dict[int, float]:
    return {number: by_place[row.place] for number, row in enumerate(read.rows) if row.place in by_place}
