"""`workbench data`: a page on the rows of a recipe, and a table of the rows that rules of quality flag."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from workbench.config import RunConfig
from workbench.config.sections.distill_config import TEACHER
from workbench.data.text.quality import survey
from workbench.data.text.quality.survey import Findings, SourceRows
from workbench.data.text.row_encoder import row_encoder
from workbench.errors import ConfigError
from workbench.models import backbones
from workbench.recipes.over import distill
from workbench.recipes.single import streamed_rows
from workbench.recipes.task import RowFile, implementation
from workbench.recipes.tasks.sft.text_run import read_template
from workbench.recipes.verbs import row_perplexities
from workbench.report import data_page
from workbench.runs import files

PAGE, FLAGS, PERPLEXITIES = "data.html", "flags.parquet", "perplexity.parquet"


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
    config = streamed_rows.local(config)
    over = config.over
    if not (over is None or over.members is None):
        if not over.ships:
            raise ConfigError(
                f"recipe={config.recipe}: each member has rows of its own. Write recipe={config.task.name} "
                f"{config.recipe}={{}} data.train=FILE."
            )
        plain: RunConfig = over.members(config)[0].model_copy(update={"seed": config.seed})
        teacher = distill.find_teacher(config) if config.model.id == TEACHER else None
        config = plain if teacher is None else plain.model_copy(update={"model": teacher.model})
    size = row_perplexities.sample_size(perplexity, config)
    files.require_writable(out / PAGE)
    lenient = config.model_copy(update={"data": config.data.model_copy(update={"on_bad_row": "skip"})})
    sources = list(_sources(lenient))
    read = implementation(lenient).survey(lenient, sources)
    if size is not None:
        tokenizer = backbones.tokenizer(lenient.model)
        base = row_encoder(lenient, backbones.hub_config(lenient.model), tokenizer, template=read_template(lenient))
        by_title, note = row_perplexities.measure(lenient, [each[:2] for each in sources], tokenizer, base, size)
        read[0] = replace(read[0], notes=(note,) if note else ())
        read = [replace(each, perplexities=_numbered(each, by_title.get(each.title, {}))) for each in read]
    report = DataReport(config, survey.examine(read), out / PAGE, out / FLAGS)
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
    files.write_bytes(report.page, data_page.page(name or config.recipe, config.data, report.findings).encode())
    return report


def _sources(config: RunConfig) -> Iterator[RowFile]:
    """Yield each file that the recipe names."""
    data = config.data
    for name, own in data.training_files.items():
        yield RowFile(_titled("Train", name), own, True)
    for title, named in {"Held-out": data.held_out_files, "Test": data.test_files}.items():
        for name, path in named.items():
            yield RowFile(_titled(title, name), data.model_copy(update={"train": path, "limit": None}), False)


def _titled(title: str, name: str) -> str:
    return f"{title}: {name}" if name else title


def _numbered(read: SourceRows, by_place: Mapping[str, float]) -> dict[int, float]:
    """Perplexities by the numbers of the rows."""
    return {number: by_place[row.place] for number, row in enumerate(read.rows) if row.place in by_place}
