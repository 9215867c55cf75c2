"""What verbs print: tables and short sentences for a terminal. What `check` prints is in `check_output`.

Imports nothing heavy at the top: `workbench ls` and `workbench explain` answer at once.
"""

from __future__ import annotations

import itertools
import json
import shutil
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer
from rich.box import HEAVY_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from workbench.errors import ConfigError
from workbench.schema import did_you_mean

if TYPE_CHECKING:
    import pandas as pd

    from workbench.config.foreign.translation import Translation
    from workbench.config.glossary import Term
    from workbench.config.reference import NamedChoice, SettingReference
    from workbench.models.model_sizes import SizeTable
    from workbench.planning.plan import Plan
    from workbench.recipes.over.blend import Blended
    from workbench.recipes.single.sampled_answers import SampledRows
    from workbench.recipes.verbs.combine import Combined
    from workbench.recipes.verbs.data_report import DataReport
    from workbench.recipes.verbs.export import Exported
    from workbench.recipes.verbs.family import FamilyFindings
    from workbench.recipes.verbs.merge import Merged
    from workbench.recipes.verbs.plans.longest_rows import LongestRow
    from workbench.recipes.verbs.rate_finder import Tried
    from workbench.report import Comparison

OUT = Console(highlight=False, soft_wrap=False)

MANY = 10
"""Recipes of a group beyond which `ls` shows the group alone."""
FARTHEST = 8
"""Members of a search that are shown."""
TOLD = 2**30
"""Bytes of the host's memory from which a plan tells them, where it does not know how many there are."""


def table(
    columns: Iterable[str],
    rows: Iterable[Sequence[str]] = (),
    *,
    right: Collection[int] | None = None,
    title: str = "",
    framed: bool = False,
    styles: Sequence[str | None] = (),
) -> Table:
    """A table whose cells are plain text, never markup.

    Args:
        right: Numbers of the columns that are flush right; by default all but the first.
        framed: With lines around it and the title in the middle, else the title at the left.
        styles: One for each row.
    """
    justify: Literal["center", "left"] = "center" if framed else "left"
    built = Table(title=escape(title) or None, title_justify=justify, box=HEAVY_HEAD if framed else None)
    for number, column in enumerate(columns):
        is_right = number > 0 if right is None else number in right
        built.add_column(Text(column), justify="right" if is_right else "left")
    for number, row in enumerate(rows):
        built.add_row(*map(Text, row), style=styles[number] if styles else None)
    return built


def _lines(*lines: str) -> None:
    for line in lines:
        OUT.print(line, markup=False)


def outcome(run: Path) -> str:
    """Print scores before and after, three answers, and where the report is; of a cross-validation its stages.

    Returns:
        The same as plain text.
    """
    OUT.record = True
    if (run / "stages.json").exists():
        _stages(run)
    elif (run / "fleet.json").exists():
        _fleet(run)
    elif (run / "rounds.json").exists():
        _rounds(run)
    else:
        import pandas as pd

        from workbench.config.task_facts import task_of
        from workbench.report import findings, pages, run_record, teacher_worth
        from workbench.runs import cost_table, score_files
        from workbench.runs.files import read_json
        from workbench.runs.run_directory import shipped_values

        record = run_record.read(run)
        OUT.print(Text(f"\n{findings.verdict(record)}\n", style="bold"))
        scores = read_json(run / "scores.json")
        run_scores = score_files.of_rows(scores)
        predictions = pd.read_parquet(run / "predictions.parquet")
        task = task_of(shipped_values(run))
        rates = task is not None and task.report == "rewards"
        embeds, classifies = rates or (task is not None and task.report == "retrieval"), "predicted" in predictions
        first = "baseline" if classifies or rates else "before"
        named = pages.scores(record)
        sure = any(each["interval"] for each in named)
        rows = [
            [each["label"], *(f"{of[name]:.4f}" if name in of else "" for of in run_scores.values())]
            + ([each["interval"]] if sure else [])
            for each in named
            if not each["folded"]
            for name in [each["name"]]
        ]
        columns = ["score", *(first if when == "before" else when for when in run_scores)]
        columns += ["95 %, after"] if sure else []
        OUT.print(table(columns, rows, title="Held-out scores", framed=True))
        if more := len(named) - len(rows):
            _lines(f"{more} more are in the report.")
        if (costs := cost_table.read(scores.get(score_files.COSTS))) is not None:
            OUT.print(Text(), table(cost_table.COLUMNS, costs.rows, title="What the student costs"))
            _lines(costs.note)
        _swept(run)
        _searched(run)
        if embeds:
            shown = ("nearest", "label", "nearest_label", "score", "similarity", "rejected")
            _examples(predictions, "text", (*shown, "chosen_reward", "rejected_reward"), width=15)
        elif classifies:
            _examples(predictions, "text" if "text" in predictions else "row", ("label", "predicted"))
        else:
            _examples(predictions, "prompt", ("reference", "before", "after"))
        if (worth := teacher_worth.worth(record)) is not None:
            _lines(f"\n{worth.sentence}")
        frozen = findings.frozen(record)
        for finding in findings.findings(record):
            told = finding == frozen or finding.tone == "warning"
            if told and finding.text != (worth and worth.sentence):
                _lines(f"\n{finding.text}")
        _lines(f"\nReport: {run / 'report.html'}    Adapter: {run / 'adapter'}")
        _next(run)
    return OUT.export_text()


def _examples(predictions: pd.DataFrame, heading: str, columns: Sequence[str], width: int = 10) -> None:
    """Three rows, evenly spaced: the end of a prompt or the beginning of a text, and the values of columns."""
    for _, row in predictions.iloc[:: max(1, len(predictions) // 3)].head(3).iterrows():
        text = str(row[heading])
        shown = f"\n... {text[-160:].strip()}" if heading == "prompt" else f"\n{text[:160].strip()}"
        OUT.print(Text(shown, style="dim"))
        for name in (name for name in columns if name in row):
            value = str(row[name]) or "(nothing)"
            OUT.print(Text.assemble((f"{name:>{width}}  ", "bold"), value if heading == "prompt" else value[:160]))


def _next(run: Path) -> None:
    """Print the commands that go on from here."""
    from workbench.adapters import METHODS
    from workbench.config.task_facts import over_of, task_of
    from workbench.runs.run_directory import shipped_values

    values = shipped_values(run)
    section, task, over = values.get("adapter") or {"method": "lora"}, task_of(values), over_of(values)
    method = METHODS[section["method"]].model_validate(section)
    heard = task is not None and (values.get("data") or {}).get("format") in task.media
    asked = task is not None and task.writes_text
    words, why = ("recording.wav", "write what it hears") if heard else ('"..."', "ask it something")
    commands = {f"workbench generate {run} {words}": why} if asked else {}
    if task is not None and task.predicts is not None:
        name, does = task.predicts
        commands[f"workbench predict {run} FILE --out {name}"] = does
    commands[f"workbench evaluate {run} data.test=FILE"] = "score it on other rows"
    folded = over is not None and over.folds and not (run / "adapter").exists()
    if not method.facts.no_merge and not folded:
        commands[f"workbench merge {run} --out merged"] = "write a stock model"
    width = max(map(len, commands))
    for number, (command, purpose) in enumerate(commands.items()):
        OUT.print(f"{'Next:' if number == 0 else '':6}{command:{width}}  {purpose}", markup=False, soft_wrap=True)


def _stages(run: Path) -> None:
    from workbench.report import crossval_section, findings, run_record

    this = run_record.read(run)
    main = crossval_section.main_title(this, crossval_section.main_score(this))
    tested = "test" in this.scores
    rows = [
        [
            each.title,
            "yes" if each.kept else "no",
            each.loss,
            each.chance,
            each.score,
            *(each.test[1:] if tested else ()),
            each.seconds if each.passes == "1x" else f"{each.seconds}, {each.passes} later",
        ]
        for each in crossval_section.stages(this)
    ]
    if rows:
        columns = ["stage", "kept", "loss", "change, 95 %", main, *([f"test {main}"] if tested else []), "cost"]
        OUT.print(table(columns, rows, right=range(2, len(columns)), title="Stages, scored out of fold"), Text())
    else:
        summary = this.stages["summary"]
        rows = [
            [name, *(f"{own[key]:.4f}" for key in ("mean", "spread", "low", "high"))] for name, own in summary.items()
        ]
        OUT.print(table(["score", "mean", "spread", "95 %, low", "high"], rows, title="Scores of the folds"), Text())
    _lines(findings.verdict(this), f"\nReport: {run / 'report.html'}    Adapters: {run / 'members'}")
    _next(run)


def _fleet(run: Path) -> None:
    """The members of a fleet, each a run of its own."""
    from workbench.report import sweep_sections

    fleet = sweep_sections.read_fleet(run)
    assert fleet is not None, "a fleet has members"
    first = next((row[0] for row in fleet.members if (run / "members" / row[0] / "adapter").exists()), "NAME")
    OUT.print(table(fleet.columns, fleet.members, title="Members, each on held-out rows of its own", framed=True))
    for sentence in (
        *fleet.notes,
        f"\nReport: {run / 'report.html'}    Runs: {run / 'members'}",
        f"Next: workbench evaluate {run / 'members' / first} data.test=FILE",
    ):
        OUT.print(sentence, markup=False, soft_wrap=True)


def _rounds(run: Path) -> None:
    """The rounds, each a run of its own, and what came of them."""
    from workbench.report import sweep_sections

    rounds = sweep_sections.read_rounds(run)
    assert rounds is not None, "its table is there"
    OUT.print(Text(f"\n{rounds.notes[0]}\n", style="bold"))
    OUT.print(table(rounds.columns, rounds.members, title="Answers to the held-out prompts", framed=True))
    _lines(f"\nReport: {run / 'report.html'}    Adapter: {run / 'adapter'}    Rounds: {run / 'members'}")
    _next(run)


def _swept(run: Path) -> None:
    """The settings of a sweep with mean and spread over seeds, of the held-out loss and of every score."""
    from workbench.report import sweep_sections

    if (swept := sweep_sections.read_sweep(run)) is not None:
        rows = [each.row for each in swept.settings]
        styles = ["bold green" if each.ships else None for each in swept.settings]
        title, right = "Held-out loss by setting, over seeds", range(len(swept.columns))
        OUT.print(table(swept.columns, rows, right=right, title=title, framed=True, styles=styles))
        if swept.seeded:
            columns = [name.rpartition(".")[2] for name in swept.score_columns]
            title, right = "Scores of what was saved, over seeds", range(len(columns) - 4, len(columns))
            OUT.print(table(columns, swept.scores, right=right, title=title, framed=True))
        _lines(*swept.notes)


def _searched(run: Path) -> None:
    """The members of a search that came farthest, and which settings matter."""
    from workbench.report import sweep_sections

    if (searched := sweep_sections.read_search(run)) is None:
        return
    columns = [name.rpartition(".")[2].removeprefix("loss ") for name in searched.columns]
    styles = ["bold green" if number == searched.shipped else None for number in range(FARTHEST)]
    members, right = searched.members[:FARTHEST], range(len(columns))
    OUT.print(table(columns, members, right=right, title="Members that came farthest", framed=True, styles=styles))
    if searched.settings:
        _lines("Explained: " + ", ".join(f"{key} {value}" for key, value in searched.settings))
    _lines(*searched.notes)


def plan(plan: Plan, longest: LongestRow | None = None) -> None:
    """Print a plan: memory, where it lies, the alternatives, whether it fits, and the longest row that would."""
    for part in plan_parts(plan):
        OUT.print(part, markup=False)
    if longest is not None:
        _lines(longest.sentence)


def plan_json(plan: Plan, longest: LongestRow | None = None) -> None:
    """Print a plan as one JSON object."""
    print(json.dumps(plan.facts | ({} if longest is None else {"longest_row": longest._asdict()})))


def plan_parts(plan: Plan) -> Iterator[Table | Text | str]:
    """Yield tables and sentences of a plan: memory, where it lies, the alternatives, and whether it fits."""
    from workbench.runs import units

    rows = [(name, units.size(size)) for name, size in plan.at_peak.items()]
    each = f" on each of {plan.devices} devices" if plan.devices > 1 else ""
    peak = table([f"bytes{each} at the peak of training", ""], rows)
    peak.add_row("together", units.size(sum(plan.at_peak.values())), end_section=True)
    peak.add_row("an evaluation", units.size(plan.evaluation))
    if plan.offloaded:
        peak.add_row("inputs of blocks in the host's memory", units.size(plan.offloaded))
    if plan.process:
        peak.add_row("Python and its libraries", units.size(plan.process))
    yield from (peak, Text())

    if plan.devices > 1 or plan.distributed.sharded:
        elsewhere = {"host": ("in the host's memory", plan.host), "disk": ("on disk", plan.disk)}
        used = {place: told for place, told in elsewhere.items() if told[1]}
        heads = [f"{where} for each ({units.size(size * plan.devices)} in all)" for where, size in used.values()]
        moments = [
            [
                moment,
                *(
                    ", ".join(f"{name} {units.size(size)}" for name, size in vars(held)[place].items())
                    for place in ("device", *used)
                ),
            ]
            for moment, held in plan.timeline.items()
        ]
        yield from (table(["in", "on each device", *heads], moments, right=()), Text())

    if len(plan.tried) > 1:
        ways = [
            (
                way.way,
                f"{way.tokens:,}",
                units.size(way.needed),
                units.step(way.seconds) if way.seconds else "",
                way.verdict,
            )
            if way.tokens
            else (way.way, "", "", "", way.verdict)
            for way in plan.tried
        ]
        styles = ["bold" if way.verdict == "taken" else None for way in plan.tried]
        columns = ["tried", "tokens a pass", "memory", "a step", ""]
        yield from (table(columns, ways, right=range(1, 4), styles=styles), Text())

    time = ""
    if plan.seconds is not None:
        interval = (
            "" if plan.interval is None else f" ({units.step(plan.interval[0])} to {units.step(plan.interval[1])})"
        )
        before = f" with {units.duration(plan.once)} before the first" if plan.once else ""
        whole = units.duration(plan.once + plan.seconds * plan.steps)
        time = f", {units.step(plan.seconds)} a step{interval}, {whole} in all{before}"
    passes = plan.dry_run.micro_batches
    yield (
        f"{plan.size.trainable:,} of {plan.size.total:,} parameters train ({plan.weights} weights); the adapter's "
        f"file has {units.size(plan.size.file_bytes)}.\n{plan.steps:,} steps, {passes} pass{'es' * (passes > 1)} of "
        f"at most {units.count(plan.tokens_per_device)} tokens each; "
        f"{plan.dry_run.flops_per_token / 1e6:,.1f} MFLOP a token{time}."
    )
    device = plan.device if plan.card is None else plan.card.name
    where = f"{device}, {plan.distributed.words}" if plan.devices > 1 or plan.distributed.sharded else device
    needed = f"{units.size(plan.needed)} of {units.size(plan.memory)} on {where}"
    if plan.host_memory is not None and plan.device != "cpu":
        needed += f", {units.size(plan.host_needed)} of {units.size(plan.host_memory)} of the host's memory"
    elif plan.host_needed >= TOLD:
        needed += f", if the host has {units.size(plan.host_needed)} (--host-memory)"
    yield f"{'Fits' if plan.fits else 'Does not fit'}: {needed}. {' '.join(plan.notes)}".rstrip()
    if plan.members is not None:
        yield plan.members.sentence


def scores(values: Mapping[str, float]) -> None:
    """Print one column of scores."""
    rows = [(name, f"{value:.4f}") for name, value in values.items()]
    OUT.print(table(["score", "value"], rows, right=(), framed=True))
    from workbench.data.named_sets import WITHOUT

    if any(f"[{WITHOUT}]" in name for name in values):
        _lines(f"Some of these rows are copies of training rows. Scores named [{WITHOUT}] leave them out.")


def tasks(rows: Sequence[Mapping[str, str]], *, before: str) -> None:
    """Print scores of lm-eval's tasks, a metric a line."""
    columns = ["task", "metric", "documents", before, "this run", "difference", "95 %"]
    OUT.print(table(columns, [list(row.values()) for row in rows], right=(), framed=True))


def sampled(sampled: SampledRows, out: Path) -> None:
    """Print how good sampled answers are, and signs that they game the reward."""
    best = "" if sampled.best is None else f", of the best to each prompt that ended by itself {sampled.best:.3f}"
    typer.echo(
        f"{sampled.rows:,} rows in {out}, from {sampled.answers:,} answers to {sampled.prompts:,} prompts; "
        f"{sampled.finished:.0%} ended by themselves."
    )
    if sampled.reward is not None:
        over = ""
        if (within := sampled.reward_interval) is not None:
            over = f" (95 % over prompts: {within[0]:.3f} to {within[1]:.3f})"
        typer.echo(f"Mean reward {sampled.reward:.3f}{over}{best}.")
    if sampled.passes:
        told = (
            f"pass@{k} {value:.3f}" + (f" ({bounds[0]:.3f} to {bounds[1]:.3f})" if bounds else "")
            for k, (value, bounds) in sampled.passes.items()
        )
        typer.echo(f"One or more of k answers right: {', '.join(told)}.")
    if (choice := sampled.choice) is not None:
        low, high = choice.interval or (0.0, 0.0)
        verdict = (
            "The choice helps." if low > 0 else "The choice harms." if high < 0 else "No difference beyond chance."
        )
        bounds = "" if choice.interval is None else f" (95 %: {low:+.3f} to {high:+.3f})"
        typer.echo(
            f"Against the answers of {choice.rows:,} rows: {choice.name} of one answer {choice.first:.3f}, of the "
            f"chosen ones {choice.second:.3f}; difference {choice.difference:+.3f}{bounds}. {verdict}"
        )
    if sampled.tokens is not None:
        cost = "" if sampled.cost is None else f", which cost {sampled.cost:.4g}"
        typer.echo(f"The server read {sampled.tokens[0]:,} tokens and wrote {sampled.tokens[1]:,}{cost}.")
    signals = sampled.signals
    if "best_words" in signals:
        typer.echo(
            f"The best answers have {signals['best_words']:.1f} words, all {signals['words']:.1f}; of their runs of "
            f"four words they repeat {signals['best_repetition']:.1%}, all {signals['repetition']:.1%}."
        )
    if "length_correlation" in signals:
        typer.echo(f"Rank correlation of length and reward: {signals['length_correlation']:+.2f}.")
    for reason in sampled.left_out[:20]:
        typer.echo(f"left out: {reason}", err=True)
    if (more := len(sampled.left_out) - 20) > 0:
        typer.echo(f"left out: {more:,} more.", err=True)


def merged(merged: Merged, out: Path) -> None:
    """Print a merge and its error."""
    _lines(f"{merged.sentence}\nModel: {out}")
    OUT.print(f"Against the unmerged model: {merged.agreement.sentence}")
    if merged.rounded is not None:
        OUT.print(f"Rounding the backbone alone, unmerged: {merged.rounded.sentence} --weights float32 rounds nothing.")


def exported(exported: Exported, out: Path) -> None:
    """Print an export, its error, and the lines that load it."""
    OUT.print(f"{exported.sentence}\nExport: {out}\n{exported.error}", markup=False, soft_wrap=True)
    if exported.costs:
        from workbench.models.exporting.card import QUANTISED_COLUMNS

        OUT.print("\n".join(exported.notes), markup=False, soft_wrap=True)
        OUT.print(table(QUANTISED_COLUMNS, exported.costs, right=(1, 2, 3), framed=True))
    OUT.print(exported.usage, markup=False, style="bold", soft_wrap=True)
    if exported.pushed is not None:
        _lines(f"Pushed to {exported.pushed}")


def drafts(found: Mapping[str, Any]) -> None:
    """Print how a student drafts for its teacher."""
    from workbench.runs import draft_table

    drafted = draft_table.read(found)
    assert drafted is not None, "it was measured"
    OUT.print(table(draft_table.COLUMNS, drafted.rows, framed=True))
    OUT.print(drafted.note, markup=False, soft_wrap=True)


def combined(combined: Combined, out: Path) -> None:
    """Print a combined adapter, and the layers where it is least exact."""
    low, high = combined.ranks
    ranks = f"rank {high}" if low == high else f"ranks {low} to {high}"
    _lines(f"Combined adapter of {ranks}, {combined.parameters:,} parameters: {out}")
    OUT.print(f"Against what --by gives: relative error {combined.error.overall:.2e} (Frobenius norm, all layers).")
    if combined.error.overall >= 1e-6:
        worst = sorted(combined.error.layers.items(), key=lambda item: -item[1])[:5]
        rows = [(layer, f"{error:.2e}") for layer, error in worst]
        OUT.print(table(["layers that lost most", "relative error"], rows, right=(), framed=True))
    if (choice := combined.choice) is not None:
        scores = dict(choice.trials)
        alone = next(score for weights, score in scores.items() if weights[choice.best_alone] == sum(weights) == 1)
        kept = ", ".join(f"{weight:.3g}" for weight in choice.kept)
        _lines(
            f"Weights {kept}. On {choice.rows} held-out rows: {choice.score} {choice.held_out:.4f}, "
            f"the best run alone {alone:.4f}."
        )
        if choice.chosen:
            _lines(f"These rows chose the weights, among {len(choice.trials)}: on other rows expect less.")
        if choice.test:
            parts = ", ".join(f"{name} {score:.4f}" for name, score in choice.test.items())
            _lines(f"On test rows, which chose nothing: {choice.score} {parts}.")


def blended(blended: Blended, out: Path) -> None:
    """Print the parts of a blend with what each is worth, and its scores."""
    first = blended.parts[0].scores
    main = next((name for name in ("accuracy", "exact_match", "rmse") if name in first), "loss")
    rows = [
        (
            str(part.run),
            "all" if part.weight is None else f"{part.weight:.2f}",
            *(f"{part.scores[name]:.4f}" for name in dict.fromkeys(("loss", main))),
            f"{part.gain.difference:+.4f} ({part.gain.low:+.4f} to {part.gain.high:+.4f})",
        )
        for part in blended.parts
    ]
    columns = ["part", "weight", *dict.fromkeys(("loss", main)), "change of the loss by it (95 %)"]
    OUT.print(table(columns, rows, title=f"{blended.title}, out of fold", framed=True))
    names = [name for name in blended.scores["after"] if not name.endswith(("_low", "_high"))]
    columns_of = {when: each for when, each in blended.scores.items() if when != "before"}
    lines = [[name, *(f"{each[name]:.4f}" if name in each else "" for each in columns_of.values())] for name in names]
    OUT.print(
        table(["score", *("out of fold" if when == "after" else when for when in columns_of)], lines, framed=True)
    )
    _lines(f"\nReport: {out / 'report.html'}", f"Next: workbench predict {out} FILE --out FILE.csv")


def comparison(comparison: Comparison, out: Path) -> None:
    """Print runs as columns: measures, settings that differ, what makes them less comparable than they look; pairs."""
    side_by_side = table(comparison.columns, comparison.rows, right=(), framed=True)
    side_by_side.add_section()
    for row in comparison.settings:
        side_by_side.add_row(*map(Text, row))
    OUT.print(side_by_side)
    _lines(*comparison.notes)
    if comparison.paired:
        paired(comparison.paired)
    _lines(f"Plots: {out}")


def paired(rows: Sequence[Sequence[str]]) -> None:
    """Print differences on the same rows, as `pages.PAIRED_COLUMNS` has them."""
    from workbench.report import pages

    pairs = table(pages.PAIRED_COLUMNS, rows, right=(), title="On the same rows", framed=True)
    pairs.title_justify = "left"
    OUT.print(pairs)
    _lines(pages.paired_note(rows))


def data(report: DataReport) -> None:
    """Print lengths, what each rule flags, a verdict, and where the page and the flags are."""
    from workbench.report import data_page

    findings = report.findings
    lengths = ["rows", "unit", "in all", "median", "95 %", "99 %", "longest", "cut"]
    if rows := data_page.length_rows(findings, report.config.data):
        OUT.print(table(lengths, rows, right=range(2, 8)))
    rules = [(rule.name, *rule.counts, rule.share) for rule in data_page.rules(findings)]
    if rules:
        flagged = table(["flagged by", *(each.read.title for each in findings), "share"], rules)
        flagged.columns[0].no_wrap = True
        OUT.print(flagged)
    _lines(data_page.verdict(findings), *(note for each in findings for note in each.notes))
    _lines(*(each.sentence for each in report.shifts))
    _lines(f"\nPage: {report.page}    Flags: {report.flags}")


def learning_rates(tried: Tried) -> None:
    """Print a line for each rate, the suggestion with its rule and its doubts, and where table and plot are."""
    from workbench.recipes.verbs import rate_finder

    choice = tried.choice
    rows = []
    for each in choice.tried:
        if each.mean is None or each.excess is None:
            rows.append((f"{each.rate:g}", "", "", f"exploded after step {len(each.losses)}"))
            continue
        apart = "" if each is choice.best else f"{each.excess:.4f} ± {each.error:.4f}"
        alike = choice.lowest.rate <= each.rate <= choice.highest.rate
        verdict = "lowest" if each is choice.best else "alike" if alike else ""
        rows.append((f"{each.rate:g}", f"{each.mean:.4f}", apart, verdict))
    columns = ["learning rate", f"loss of the last {choice.late} steps", "above the lowest", ""]
    OUT.print(table(columns, rows, right=range(3)))
    _lines(*rate_finder.sentences(tried))
    _lines(f"Plot: {tried.folder / rate_finder.PLOT}    Table: {tried.folder / rate_finder.TABLE}")


def listing(what: str, folder: Path) -> None:
    """Print the shipped recipes or those of one group, such as `sft`, or the runs of a folder."""
    from workbench.recipes import shipped
    from workbench.runs.files import read_json

    groups: dict[str, list[str]] = {}
    for name in shipped():
        groups.setdefault(name.partition("/")[0], []).append(name)
    if what == "recipes":
        for group, names in groups.items():
            if len(names) > MANY:
                some = ", ".join(names[:: len(names) // 2])
                _recipe(f"workbench ls {group}", f"{len(names)} recipes, such as {some}.")
            else:
                _recipes(names)
    elif what in groups:
        _recipes(groups[what])
    elif what == "runs":
        listed = Table("run", "status", "held-out loss before", "after")
        for path in sorted(folder.glob("*/manifest.json")):
            run_scores = read_json(path.parent / "scores.json")
            losses = (f"{run_scores[when]['loss']:.4f}" if when in run_scores else "" for when in ("before", "after"))
            listed.add_row(Text(str(path.parent)), read_json(path).get("status", ""), *losses)
        OUT.print(listed)
    else:
        meant = did_you_mean(what, [*groups, "recipes", "adapters", "runs"])
        raise ConfigError(f"ls {what}: expected recipes, a group of them such as sft, adapters or runs.{meant}")


def _recipes(names: Iterable[str]) -> None:
    """Of each recipe its command, and what else its first comments say."""
    from workbench.recipes import CONFIGS, FOR_EDITORS

    for name in names:
        lines = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
        head = itertools.takewhile(lambda line: line.startswith("#") and not line.startswith(FOR_EDITORS), lines)
        command, *said = (line.lstrip("# ") for line in head)
        _recipe(command, " ".join(said))


def _recipe(command: str, said: str) -> None:
    OUT.print(Text(command, style="bold"), soft_wrap=True)
    _lines(textwrap.fill(said, OUT.width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False))


def methods(known: SizeTable) -> None:
    """Print a table of methods: description, size on one backbone, and reasons where one does not apply."""
    from workbench.adapters import METHODS, NOT_OFFERED
    from workbench.adapters.method import WEIGHTS
    from workbench.runs import units

    about = {name: METHODS[name].about[name] for name in known.sizes}
    described = [(name, each.trains, each.paper) for name, each in about.items()]
    refused = [(name, size) for name, size in known.sizes.items() if isinstance(size, str)]
    sized = []
    for name, size in known.sizes.items():
        if not isinstance(size, str):
            formats = "all" if about[name].weights == WEIGHTS else " ".join(about[name].weights)
            numbers = (f"{size.trainable:,}", units.percent(size.share), units.size(size.file_bytes))
            sized.append((name, *numbers, "no" if about[name].no_merge else "yes", formats))
    columns = ["method", "trainable", "share", "file", "merges", "weights"]
    title = f"\nOn {known.model.id}, {known.parameters:,} parameters"
    sizes = table(columns, sized, right=range(1, 4), title=title)
    OUT.print(table(["method", "what trains", "paper"], described, right=()), sizes)
    absent = list(NOT_OFFERED.items()) if len(known.sizes) > 1 else []
    for head, rows in (("does not work here", refused), ("PEFT's, and not offered", absent)):
        if rows:
            OUT.print(Text(), table(["method", head], rows, right=()))


def methods_json(known: SizeTable) -> None:
    """Print methods and their sizes as one JSON object."""
    from workbench.adapters import METHODS, NOT_OFFERED

    rows = {}
    for name, size in known.sizes.items():
        what = {"refusal": size} if isinstance(size, str) else {**size._asdict(), "share": size.share}
        rows[name] = asdict(METHODS[name].about[name]) | what
    facts = {"model": known.model.id, "parameters": known.parameters, "methods": rows, "not_offered": NOT_OFFERED}
    print(json.dumps(facts, indent=1))


def settings(settings: Sequence[SettingReference], words: str) -> None:
    """Print what `explain` knows: one setting in full, of several a line each."""
    exact = [each for each in settings if each.key == words and not each.is_section]
    if exact or len(settings) == 1:
        for setting in exact or settings:
            _setting(setting)
        settings = [each for each in settings if exact and each not in exact]
        if not settings:
            return
        typer.echo("")
    shown = [f"{each.key} = {each.default}" if each.default and not each.is_section else each.key for each in settings]
    heads = [_cut(head, 48) for head in shown]
    for head, setting in zip(heads, settings, strict=True):
        typer.echo(_cut(f"{head:{max(map(len, heads))}}  {setting.meaning}", _width()))
    typer.echo("One of them in full: workbench explain KEY")


def choices(chosen: Sequence[NamedChoice]) -> None:
    """Print the sections that a name chooses, such as a method, and the keys that they have."""
    for choice in chosen:
        typer.echo(f"{choice.key}={choice.name}")
        _paragraph("  meaning    ", choice.meaning)
        if choice.papers:
            _paragraph("  paper      ", "; ".join(choice.papers))
        heads = [f"{each.key}" + (f" = {each.default}" if each.default else "") for each in choice.settings]
        for head, setting in zip(heads, choice.settings, strict=True):
            typer.echo(_cut(f"  {head:{max(map(len, heads))}}  {setting.meaning}", _width()))


def terms(met: Sequence[Term]) -> None:
    """Print what words of the glossary mean, with the settings and commands where they are met."""
    from workbench.config import reference

    known = {each.key: each for each in reversed(reference.settings())}
    for term in met:
        _paragraph("", f"{', '.join(term.words)}: {term.meaning}")
        told = {place: known[place.partition("=")[0]].meaning for place in term.where if place not in term.commands}
        for place, meaning in told.items():
            typer.echo(_cut(f"  {place:{max(map(len, told))}}  {meaning}", _width()))
        for command in term.commands:
            typer.echo(f"  {command}")
    typer.echo("A setting in full: workbench explain KEY")


def _setting(setting: SettingReference) -> None:
    from workbench.config import reference

    typer.echo(setting.key)
    lines = {
        "values": setting.values,
        "unit": setting.unit,
        "default": setting.default or "none: it must be written",
        "meaning": setting.meaning,
        "why": setting.why,
        "paper": "; ".join(setting.papers),
        "only with": ", ".join(setting.of),
    }
    for name, text in lines.items():
        if text:
            _paragraph(f"  {name:10} ", text)
    words = reference.choices(setting.key)
    for name, text in words.items():
        _paragraph(f"    {name:{max(map(len, words))}}  ", text)


def _paragraph(head: str, text: str) -> None:
    typer.echo(textwrap.fill(text, _width(), initial_indent=head, subsequent_indent=" " * len(head)))


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def _width() -> int:
    return max(60, shutil.get_terminal_size((120, 24)).columns)


def translation(translation: Translation, out: Path) -> None:
    """Print what became of the settings of another tool's file, and what comes next."""
    for title, lines in translation.report().items():
        if title == "Translated":
            lines = [f"{len(translation.translated)} settings; {out} lists them."]
        typer.echo(f"{title}:")
        for line in lines:
            typer.echo(textwrap.fill(line, 100, initial_indent="  - ", subsequent_indent="    "))
    typer.echo(f"{out} written. Next: workbench check {out}")


def family(found: FamilyFindings) -> None:
    """Print what works with an architecture: a sign and a sentence each."""
    from workbench.recipes.verbs.family import SIGNS

    typer.echo(f"{found.family}, tried on a random model of {found.parameters:,} parameters.")
    for each in found.findings:
        first = f"  {SIGNS[each.outcome]} {each.subject:13} "
        typer.echo(textwrap.fill(each.sentence, _width(), initial_indent=first, subsequent_indent=" " * len(first)))
    typer.echo("+ works, - is refused, ! failed, . has none.")
