"""`workbench data`: a page on the rows of a recipe, and a table of the rows that rules of quality flag."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from workbench.recipes.load import Recipe, load
from workbench.recipes.over import distill
from workbench.recipes.single import streamed_rows
from workbench.recipes.task import RowFile, implementation
from workbench.recipes.tasks.sft.text_run import read_template
from workbench.recipes.verbs import row_perplexities
from workbench.recipes.verbs.row_perplexities import SampleSize
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
        The `findings` on each file, and the paths of `page` and `flags`.

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
    size = row_perplexities.sample_size(perplexity, config)
    files.require_writable(out / PAGE)
    lenient = config.model_copy(update={"data": config.data.model_copy(update={"on_bad_row": "skip"})})
    read = _read(lenient, size)
    report = DataReport(config, survey.examine(read), out / PAGE, out / FLAGS)
    files.write_bytes(report.flags, _table(report.findings).to_parquet())
    if any(each.read.perplexities for each in report.findings):
        files.write_bytes(out / PERPLEXITIES, _perplexity_table(report.findings).to_parquet())
    files.write_bytes(report.page, data_page.page(name or config.recipe, config.data, report.findings).encode())
    return report


def _plain(config: RunConfig) -> RunConfig:
    """The configuration of the task that reads the rows; a student reads them as the backbone it is made of does."""
    over = config.over
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
    """Yield each file that the recipe names."""
    data = config.data
    for name, own in data.training_files.items():
        yield RowFile(_titled("Train", name), own, True)
    for title, named in {"Held-out": data.held_out_files, "Test": data.test_files}.items():
        for name, path in named.items():
            yield RowFile(_titled(title, name), data.model_copy(update={"train": path, "limit": None}), False)


def _titled(title: str, name: str) -> str:
    return f"{title}: {name}" if name else title


def _read(config: RunConfig, size: SampleSize | None) -> list[SourceRows]:
    """The rows of every file that the recipe names, with perplexities where the backbone reads some."""
    sources = list(_sources(config))
    read = implementation(config).survey(config, sources)
    if size is None:
        return read
    tokenizer = backbones.tokenizer(config.model)
    base = row_encoder(config, backbones.hub_config(config.model), tokenizer, template=read_template(config))
    by_title, note = row_perplexities.measure(config, [each[:2] for each in sources], tokenizer, base, size)
    read[0] = replace(read[0], notes=(note,) if note else ())
    return [replace(each, perplexities=_numbered(each, by_title.get(each.title, {}))) for each in read]


def _numbered(read: SourceRows, by_place: Mapping[str, float]) -> dict[int, float]:
    """Perplexities by the numbers of the rows."""
    return {number: by_place[row.place] for number, row in enumerate(read.rows) if row.place in by_place}


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
