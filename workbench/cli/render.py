"""Printing of results: tables and short sentences for a terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from workbench.adapters import METHODS
from workbench.cli import embed_table, fleet_table, fold_table, picture_table
from workbench.runs import task_scores
from workbench.runs.files import read_json
from workbench.runs.run_directory import shipped_values

if TYPE_CHECKING:
    import pandas as pd

    from workbench.data.batching import Indices
    from workbench.data.labelled.labelled_data import ClassSplits, LabelledSet
    from workbench.data.text.tokenized_set import TokenizedSet
    from workbench.planning.plan import Plan
    from workbench.recipes.check import AnyInspection
    from workbench.recipes.folds.crossval_verbs import CrossvalInspection
    from workbench.recipes.inspection import Inspection
    from workbench.recipes.labels.classify_verbs import ClassInspection
    from workbench.recipes.labels.picture_checks import PictureFindings
    from workbench.recipes.plans.longest_rows import LongestRow
    from workbench.recipes.shipping.combine import Combined
    from workbench.recipes.shipping.export import Exported
    from workbench.recipes.shipping.merge import Merged
    from workbench.report import Comparison

_out = Console(highlight=False, soft_wrap=False)

FARTHEST = 8
"""Members of a search that are shown."""


def outcome(run: Path) -> str:
    """Print scores before and after, three answers, and where the report is; of a cross-validation its stages.

    Returns:
        The same as plain text.
    """
    _out.record = True
    if (run / "stages.json").exists():
        _stages(run)
    elif (run / "fleet.json").exists():
        for part in fleet_table.parts(run):
            _out.print(part, markup=False, soft_wrap=isinstance(part, str))
    else:
        _scored(run)
    return _out.export_text()


def _scored(run: Path) -> None:
    import pandas as pd

    run_scores = task_scores.without(read_json(run / "scores.json"))
    predictions = pd.read_parquet(run / "predictions.parquet")
    recipe = shipped_values(run).get("recipe")
    embeds, classifies = recipe in embed_table.PREDICTS, "predicted" in predictions
    table, first = Table("score", title="Held-out scores"), "baseline" if classifies or recipe == "reward" else "before"
    for when in run_scores:
        table.add_column(first if when == "before" else when, justify="right")
    names = dict.fromkeys(
        [*run_scores["after"], *(name for scored in run_scores.values() for name in scored if "[" in name)]
    )
    for name in names:
        table.add_row(Text(name), *(f"{scored[name]:.4f}" if name in scored else "" for scored in run_scores.values()))
    _out.print(table)
    _swept(run)
    _searched(run)
    if embeds:
        for part in embed_table.searched(predictions):
            _out.print(part)
    elif classifies:
        _classified(predictions)
    else:
        _answered(predictions)
    _out.print(f"\nReport: {run / 'report.html'}    Adapter: {run / 'adapter'}", markup=False)
    _next(run)


def _next(run: Path) -> None:
    """The commands that go on from here."""
    values = shipped_values(run)
    recipe, section = values.get("recipe"), values.get("adapter") or {"method": "lora"}
    method = METHODS[section["method"]].model_validate(section)
    commands = (
        {f'workbench generate {run} "..."': "ask it something"} if recipe in ("sft", "prefer", "reinforce") else {}
    )
    if recipe != "mlm":
        name, does = embed_table.PREDICTS.get(str(recipe), ("answers.csv", "answer every row of a file"))
        commands[f"workbench predict {run} FILE --out {name}"] = does
    commands[f"workbench evaluate {run} data.test=FILE"] = "score it on other rows"
    if not method.facts.no_merge and (recipe != "crossval" or (values.get("folds") or {}).get("refit")):
        commands[f"workbench merge {run} --out merged"] = "write a stock model"
    width = max(map(len, commands))
    for number, (command, purpose) in enumerate(commands.items()):
        _out.print(f"{'Next:' if number == 0 else '':6}{command:{width}}  {purpose}", markup=False, soft_wrap=True)


def plan(plan: Plan, longest: LongestRow | None = None) -> None:
    """Print a plan: memory, where it lies, the alternatives, whether it fits, and the longest row that would."""
    from workbench.cli import plan_table

    for part in plan_table.parts(plan):
        _out.print(part, markup=False)
    if longest is not None:
        _out.print(longest.sentence, markup=False)


def plan_json(plan: Plan, longest: LongestRow | None = None) -> None:
    """The same, for a program."""
    print(json.dumps(plan.facts | ({} if longest is None else {"longest_row": longest._asdict()})))


def _stages(run: Path) -> None:
    from workbench.report import crossval_section, findings, run_record

    this = run_record.read(run)
    main = crossval_section.MAIN.get(crossval_section.main_score(this) or "", "score")
    tested = "test" in this.scores
    table = Table("stage", "kept", title="Stages, scored out of fold", title_justify="left", box=None)
    for column in ("loss", "change, 95 %", main, *((f"test {main}",) if tested else ())):
        table.add_column(column, justify="right")
    for stage in crossval_section.stages(this):
        numbers = (stage.loss, stage.chance, stage.score, *(stage.test[1:] if tested else ()))
        table.add_row(Text(stage.title), "yes" if stage.kept else "no", *numbers)
    _out.print(table, Text())
    _out.print(findings.verdict(this), markup=False)
    _out.print(f"\nReport: {run / 'report.html'}    Adapters: {run / 'members'}", markup=False)
    _next(run)


def _swept(run: Path) -> None:
    """The settings of a sweep, with mean and spread over seeds."""
    from workbench.report import sweep_section

    sweep_table = sweep_section.read(run)
    if sweep_table is None:
        return
    table = Table(title="Held-out loss by setting, over seeds")
    for name in sweep_table.columns:
        table.add_column(name, justify="right")
    for setting in sweep_table.settings:
        table.add_row(*map(Text, setting.row), style="bold green" if setting.ships else None)
    _out.print(table)
    for note in sweep_table.notes:
        _out.print(note, markup=False)


def _searched(run: Path) -> None:
    """The members of a search that came farthest, and which settings matter."""
    from workbench.report import search_section

    search_table = search_section.read(run)
    if search_table is None:
        return
    table = Table(title="Members that came farthest")
    for name in search_table.columns:
        table.add_column(name.rpartition(".")[2].removeprefix("loss "), justify="right")
    for number, row in enumerate(search_table.members[:FARTHEST]):
        table.add_row(*map(Text, row), style="bold green" if number == search_table.shipped else None)
    _out.print(table)
    if search_table.settings:
        _out.print("Explained: " + ", ".join(f"{key} {value}" for key, value in search_table.settings), markup=False)
    for note in search_table.notes:
        _out.print(note, markup=False)


def _answered(predictions: pd.DataFrame) -> None:
    for _, row in predictions.iloc[:: max(1, len(predictions) // 3)].head(3).iterrows():
        _out.print(Text(f"\n... {row['prompt'][-160:].strip()}", style="dim"))
        for name in (name for name in ("reference", "before", "after") if name in row):
            _out.print(Text.assemble((f"{name:>10}  ", "bold"), row[name] or "(nothing)"))


def _classified(predictions: pd.DataFrame) -> None:
    for _, row in predictions.iloc[:: max(1, len(predictions) // 3)].head(3).iterrows():
        _out.print(Text(f"\n{str(row.get('text', row['row']))[:160].strip()}", style="dim"))
        for name in ("label", "predicted"):
            _out.print(Text.assemble((f"{name:>10}  ", "bold"), str(row[name])))


def inspection(inspection: AnyInspection) -> None:
    """Rendered examples with the supervised tokens marked, lengths, and what a run would do."""
    from workbench.recipes.embeddings.embed_verbs import EmbedInspection
    from workbench.recipes.folds.crossval_verbs import CrossvalInspection
    from workbench.recipes.labels.classify_verbs import ClassInspection

    if isinstance(inspection, EmbedInspection):
        for part in embed_table.inspection(inspection):
            _out.print(part)
        _plan(inspection)
        return
    if isinstance(inspection, ClassInspection):
        _class_inspection(inspection)
        return
    if isinstance(inspection, CrossvalInspection):
        crossval_inspection(inspection)
        return
    for place, pieces in inspection.examples:
        _out.rule(Text(place))
        _out.print(Text.assemble(*((text, "bold green" if loss else "dim") for text, loss in pieces)))
    _out.rule()
    _out.print("[bold green]green[/] carries loss, [dim]grey[/] is read only.\n")
    numbers(inspection)


def numbers(inspection: Inspection) -> None:
    """Sizes and lengths of rows of text, and what a run would do with them."""
    table = Table()
    for column in ("split", "rows", "tokens", "with loss", "longest", "cut", "left out"):
        table.add_column(column, justify="left" if column == "split" else "right")
    splits = {"train": inspection.data.train, "held-out": inspection.data.held_out, "test": inspection.data.test}
    for name, split in splits.items():
        if split is not None:
            table.add_row(name, *_counts(split))
    _out.print(table)
    _out.print(_histogram(inspection.data.train.lengths))
    _plan(inspection)


def _class_inspection(inspection: ClassInspection) -> None:
    splits = {"train": inspection.data.train, "held-out": inspection.data.held_out, "test": inspection.data.test}
    _labelled(inspection.examples, splits, inspection.pictures)
    if inspection.data.labels.kind != "number":
        _out.print(_frequencies(inspection.data))
    if inspection.drawn != len(inspection.data.train):
        _out.print(f"classes.sampling draws {inspection.drawn:,} rows in an epoch.")
    _plan(inspection)


def crossval_inspection(inspection: CrossvalInspection) -> None:
    """Rendered rows, what the folds hold, what their duplicates would leak, and what a run would train."""
    data = inspection.data
    splits = {"train": data.rows, "test": data.test, "unlabelled": data.unlabelled}
    _labelled(inspection.examples, splits, inspection.pictures)
    _out.print(fold_table.sizes(data))
    _out.print(fold_table.duplicates(data), markup=False)
    times = {"deals of the rows": len(data.folds.fold_RN), "seeds": inspection.config.folds.seeds}
    counts = [f"{data.folds.k} folds", *(f"{count} {name}" for name, count in times.items() if count > 1)]
    _out.print(f"\n{inspection.members} adapters ({', '.join(counts)}), each trained as follows.")
    _plan(inspection)


def _labelled(
    examples: list[tuple[str, str, str]], splits: Mapping[str, LabelledSet | None], pictures: PictureFindings | None
) -> None:
    """Some rows as the model reads them, sizes of the splits, and the lengths or the pictures of the first."""
    there = {name: split for name, split in splits.items() if split is not None}
    if pictures is not None:
        _out.print(*picture_table.parts(pictures, there))
        return
    for place, text, label in examples:
        _out.rule(Text(place))
        _out.print(Text(text, style="dim"), Text.assemble(("label  ", "bold"), (label, "bold green")))
    _out.rule()
    table = Table()
    for column in ("split", "rows", "tokens", "longest", "cut", "left out"):
        table.add_column(column, justify="left" if column == "split" else "right")
    for name, split in there.items():
        cut = f"{split.truncated:,} ({split.truncated / len(split):.1%})"
        numbers = (len(split), int(split.lengths.sum()), int(split.lengths.max()))
        table.add_row(name, *(f"{number:,}" for number in numbers), cut, f"{len(split.skipped):,}")
    _out.print(table)
    _out.print(_histogram(there["train"].lengths))


def _plan(inspection: AnyInspection) -> None:
    from workbench.cli import outlook
    from workbench.recipes.inspection import Inspection

    where = (
        f"{len(inspection.targets)} kinds of module: {', '.join(inspection.targets[:12])}"
        if inspection.targets
        else "all weights"
    )
    batches = f"steps of {inspection.config.batch.size} examples"
    if inspection.steps is None:
        batches = f"{batches.capitalize()} until the budget is used up"
    else:
        batches = f"{'' if inspection.config.budget.unlimited else 'At most '}{inspection.steps} {batches}"
    _out.print(f"\n{batches}, training {where}.", markup=False)
    if not isinstance(inspection, Inspection) and inspection.probe:
        _out.print(inspection.probe, markup=False)
    for note in [
        *outlook.sentences(inspection.config, steps=inspection.steps, blocks=inspection.blocks),
        *inspection.notes,
    ]:
        _out.print(note, markup=False)


def _frequencies(data: ClassSplits) -> Table:
    """Rows of each class, the most frequent first."""
    counts = {name: each.facts()["classes"] for name, each in (("train", data.train), ("held-out", data.held_out))}
    table = Table("class", "train", "held-out", "", box=None, title="Classes", title_justify="left")
    most = max(counts["train"].values())
    for name in sorted(data.labels.names, key=lambda name: -counts["train"].get(name, 0)):
        rows = [counts[split].get(name, 0) for split in counts]
        table.add_row(Text(name), *(f"{count:,}" for count in rows), "#" * round(40 * rows[0] / most))
    return table


def scores(values: Mapping[str, float]) -> None:
    """One column of scores."""
    table = Table("score", "value")
    for name, value in values.items():
        table.add_row(Text(name), f"{value:.4f}")
    _out.print(table)


def tasks(rows: Sequence[Mapping[str, str]], *, before: str) -> None:
    """Tasks of lm-eval, a metric a line."""
    table = Table("task", "metric", "documents", before, "this run", "difference", "95 %")
    for row in rows:
        table.add_row(*map(Text, row.values()))
    _out.print(table)


def merged(merged: Merged, out: Path) -> None:
    """Print a merge and its error."""
    _out.print(f"{merged.sentence}\nModel: {out}", markup=False)
    _out.print(f"Against the unmerged model: {merged.agreement.sentence}")


def exported(exported: Exported, out: Path) -> None:
    """Print an export, its error, and the lines that load it."""
    _out.print(f"{exported.sentence}\nExport: {out}\n{exported.error}", markup=False, soft_wrap=True)
    _out.print(exported.usage, markup=False, style="bold", soft_wrap=True)
    if exported.pushed is not None:
        _out.print(f"Pushed to {exported.pushed}", markup=False)


def combined(combined: Combined, out: Path) -> None:
    """Print a sum of adapters, and the layers where it is least exact."""
    low, high = combined.ranks
    ranks = f"rank {high}" if low == high else f"ranks {low} to {high}"
    _out.print(f"Combined adapter of {ranks}, {combined.parameters:,} parameters: {out}", markup=False)
    _out.print(f"Against the weighted sum: relative error {combined.error.overall:.2e} (Frobenius norm, all layers).")
    if combined.error.overall < 1e-6:
        return
    worst = sorted(combined.error.layers.items(), key=lambda item: -item[1])[:5]
    table = Table("layers that lost most", "relative error")
    for layer, error in worst:
        table.add_row(Text(layer), f"{error:.2e}")
    _out.print(table)


def comparison(comparison: Comparison, out: Path) -> None:
    """Runs as columns: measures, settings that differ, what makes them less comparable than they look; and pairs."""
    from workbench.report import paired_section

    table = Table(*map(escape, comparison.columns))
    for row in comparison.rows:
        table.add_row(*map(Text, row))
    table.add_section()
    for row in comparison.settings:
        table.add_row(*map(Text, row))
    _out.print(table)
    for note in comparison.notes:
        _out.print(note, markup=False)
    if comparison.paired:
        pairs = Table(*paired_section.COLUMNS, title="On the same rows", title_justify="left")
        for row in comparison.paired:
            pairs.add_row(*map(Text, row))
        _out.print(pairs)
        _out.print(paired_section.note(comparison.paired), markup=False)
    _out.print(f"Plots: {out}", markup=False)


def _counts(split: TokenizedSet) -> list[str]:
    cut = f"{split.truncated:,} ({split.truncated / len(split):.1%})"
    numbers = (len(split), int(split.lengths.sum()), int(split.supervised.sum()), int(split.lengths.max()))
    return [*(f"{number:,}" for number in numbers), cut, f"{len(split.skipped):,}"]


def _histogram(lengths: Indices) -> Table:
    """Example lengths in eight bins."""
    import numpy as np

    counts, edges = np.histogram(lengths, bins=min(8, max(1, len(np.unique(lengths)))))
    table = Table("tokens", "examples", "", box=None, title="Lengths of the training rows", title_justify="left")
    for count, low, high in zip(counts, edges, edges[1:], strict=False):
        table.add_row(f"{low:,.0f}-{high:,.0f}", f"{count:,}", "#" * round(40 * count / counts.max()))
    return table
