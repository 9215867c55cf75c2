"""One offline page about a run, or about several side by side, from their run directories alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeVar

import pandas as pd

from workbench.config.sections.search_config import flat
from workbench.config.yaml_text import read_yaml
from workbench.evaluation import comparison, held_out_losses
from workbench.evaluation.comparison import PairedScore
from workbench.report import (
    class_section,
    crossval_section,
    curves,
    dynamics_section,
    findings,
    picture_section,
    run_record,
    score_titles,
    sweep_sections,
    task_sections,
)
from workbench.report.rendering import render
from workbench.report.run_record import RunRecord
from workbench.runs import cost_table, draft_table, files, score_files, units

_T = TypeVar("_T")
DETAILS = frozenset({"perplexity", "token_accuracy", "rouge_l"})
"""Scores beside which another one says the same in short; folded in a table of more than MOST_SCORES rows."""
MOST_SCORES = 12
COLUMNS = (
    *("before", "after", "plain", "teacher", "control", "nested"),
    *("test", "plain_test", "teacher_test", "control_test", "refit"),
)
"""Columns of the score table, where there are such scores."""
SAMPLES = 3
PAIRED_COLUMNS = ("run", "score", "rows", "first", "this", "change", "95 %", "p")
PAIRED_NOTE = (
    "The same held-out rows of both runs: Student's 95 % interval of their mean difference, and p by the exact test of "
    "McNemar where a row is right or wrong, else by the paired t-test; the loss in nats per token by the ratio "
    "estimator over rows."
)
_LEAST = 1e-4
"""Probability below which its size says nothing more."""


@dataclass(frozen=True)
class Comparison:
    """Several runs side by side: one column per run after the column of labels."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    settings: tuple[tuple[str, ...], ...]
    """The keys of config.yaml that differ, with each run's value."""
    notes: tuple[str, ...]
    """Reasons why the numbers are less comparable than they look."""
    paired: tuple[tuple[str, ...], ...] = ()
    """Each run against the first on the same rows, as PAIRED_COLUMNS has it."""


def write(run: Path) -> Path:
    """Write `report.html` into a run directory and return its path; raises ConfigError where `run` is none.

    A part that is missing is named as such.
    """
    this = run_record.read(run)
    manifest, batch = this.manifest, this.manifest.get("batch")
    size = this.config.get("batch", {}).get("size", units.NOTHING)
    facts = [("Started", manifest["created"].replace("T", " ")[:19])] if "created" in manifest else []
    if this.crossvalidates:
        facts.append(("Steps", f"{_steps(this)}, {size} examples each"))
    elif batch:
        facts.append(("Steps", f"{len(this.metrics):,} of {batch['steps']:,}, {size} examples each"))
    if batch:
        rows = batch["tokens_per_device"] / this.tokens_of_unit
        facts.append(("Micro-batch", f"{rows:,.0f} {this.unit_of_length} per device"))
    if this.data_wait is not None:
        facts.append(("Waited for data", f"{units.percent(this.data_wait)} of the time of the steps"))
    if own := manifest.get("hardware"):
        facts.append(("Hardware", f"{own['name']}, {own['cores']} cores, {units.size(own['memory_bytes'])}"))
    if manifest.get("versions"):
        facts.append(("Versions", ", ".join(f"{name} {version}" for name, version in manifest["versions"].items())))
    if manifest.get("git_commit"):
        commit, dash, changed = manifest["git_commit"].partition("-")
        facts.append(("Commit", commit[:10] + dash + changed))
    splits = this.manifest.get("data", {})
    titles = {"train": "Train", "held_out": "Held-out", "test": "Test", "unlabelled": "Unlabelled"}
    keys = ("rows", "tokens", "supervised_tokens", "truncated", "skipped", "fingerprint")

    def shown(value: int | str | None) -> str:
        return units.NOTHING if value is None else value[:12] if isinstance(value, str) else f"{value:,}"

    rows = "rows of other folds" if this.crossvalidates else "training rows"
    looked, of = (this.probe.get(key, 0) for key in ("compared", "rows"))
    page = render(
        "report.html",
        run=this,
        verdict=findings.verdict(this),
        findings=findings.findings(this),
        predicted=sorted(each.name for each in run.glob("*.csv")),
        tiles=_tiles(this),
        scores=scores(this),
        costs=cost_table.read(this.costs),
        cost_columns=cost_table.COLUMNS,
        drafts=draft_table.read(this.drafts),
        draft_columns=draft_table.COLUMNS,
        plots=[
            *sweep_sections.plots(this),
            *curves.of_run(this),
            *curves.of_mixture(this),
            *task_sections.preference_plots(this),
            *task_sections.reinforce_plots(this),
        ],
        samples=_samples(this.predictions, this.pictures),
        task_rows=task_sections.rows(this),
        classifies=this.classifies,
        classified=class_section.classified(this),
        pictures=picture_section.pictured(this),
        cross=crossval_section.crossvalidated(this),
        sweep=sweep_sections.read_sweep(run),
        search=sweep_sections.read_search(run),
        fleet=sweep_sections.read_fleet(run),
        rounds=sweep_sections.read_rounds(run),
        benchmarks=task_sections.benchmark_table(run),
        win_rates=task_sections.win_rates(run),
        layers=dynamics_section.layers(this),
        dynamics=dynamics_section.observed(this),
        facts=[("Model", _model_facts(this)), ("Run", facts)],
        data=[
            (title, splits[name]["source"], [shown(splits[name].get(key)) for key in keys])
            for name, title in titles.items()
            if splits.get(name)
        ],
        among=f"{rows} ({looked:,} of {of:,} were looked at)" if looked < of else rows,
    )
    files.write_bytes(run / "report.html", page.encode())
    return run / "report.html"


def compare(runs: Sequence[Path | str], out: Path | str = "comparison.html") -> Comparison:
    """Put runs side by side, and write a page with their plots.

    Args:
        runs: Run directories.
        out: The page.

    Returns:
        Tables, one column for each run: `rows` of scores, the `settings` that differ, and `paired` differences on the
        same held-out rows.

    Raises:
        ConfigError: One of `runs` is not a run directory.

    Examples:
        >>> import workbench
        >>> table = workbench.compare(["runs/short", "runs/short"])
        >>> len(table.columns), table.settings
        (3, ())
    """
    out = Path(out)
    records = [run_record.read(Path(run)) for run in runs]
    seen = Counter(one.name for one in records)
    names = [one.name if seen[one.name] == 1 else f"{one.name} ({one.folder})" for one in records]
    measures = [*_MEASURES, *_of_metrics(records), *_of_sets(records)]
    measures = [measure for measure in measures if any(measure.value(one) is not None for one in records)]
    # What a member or a student is, and what was written of the run beside.
    written = [flat(read_yaml(one.folder / "config.yaml")) for one in records]
    configs = [{**known, **flat(one.config)} for known, one in zip(written, records, strict=True)]
    configs = [{key: str(value) for key, value in each.items()} for each in configs]
    settings = [
        (key, *(config.get(key, units.NOTHING) for config in configs)) for key in dict.fromkeys(chain(*configs))
    ]
    pairs, paired_notes = paired(records, names)
    notes = []
    # A cross-validation holds out each training row in turn.
    splits = ((one.manifest.get("data", {}), "train" if one.crossvalidates else "held_out") for one in records)
    held_out = [data.get(split) or {} for data, split in splits]
    same_rows: tuple[str, ...] = ("source", "rows", "fingerprint", "tokens")
    differ = len({one.manifest.get("model", {}).get("id") for one in records}) > 1
    if differ and len({split.get("tokens") for split in held_out}) > 1:  # students of one teacher cut alike
        notes.append("The backbones differ, and may cut text into different tokens: losses per token do not compare.")
        same_rows = ("source", "rows")
    if len({tuple(split.get(key) for key in same_rows) for split in held_out}) > 1:
        notes.append("The held-out rows differ, or where they are cut: small differences mean nothing.")
    if len({one.manifest.get("hardware", {}).get("name") for one in records}) > 1:
        notes.append("The runs ran on different hardware: time, speed and memory do not compare.")
    comparison = Comparison(
        columns=("", *names),
        rows=tuple((measure.label, *map(measure.shown, records)) for measure in measures),
        settings=tuple(row for row in settings if len(set(row[1:])) > 1),
        notes=(*notes, *paired_notes),
        paired=tuple(pairs),
    )
    page = render(
        "comparison.html",
        table=comparison,
        paired_columns=PAIRED_COLUMNS,
        paired_note=paired_note(pairs),
        best=[measure.best(records) for measure in measures],
        plots=[*curves.of_runs(records, names), *curves.of_costs(records, names)],
        verdicts=[(name, findings.verdict(one)) for name, one in zip(names, records, strict=True)],
    )
    files.write_bytes(out, page.encode())
    return comparison


def _tiles(run: RunRecord) -> list[tuple[str, str, str]]:
    """The five numbers a person asks for first: label, value, small print."""
    manifest, metrics = run.manifest, run.metrics
    model, hardware = manifest.get("model", {}), manifest.get("hardware", {})
    steps = _steps(run) if len(metrics) else "no step yet"
    supervised = f"{units.count(metrics['supervised_tokens'].sum())} with loss" if len(metrics) else ""
    supervised = "" if run.classifies or run.embeds or run.rewards else supervised
    share = _trained_share(run)
    trained = f"{units.percent(share)} of the parameters" if share is not None else ""
    length = run.unit_of_length
    seen = units.count(metrics["tokens"].sum() / run.tokens_of_unit) if len(metrics) else units.NOTHING
    memory = "GPU memory" if hardware.get("device") == "cuda" else "resident memory"
    return [
        ("Time", units.duration(run.elapsed_s), steps),
        (f"{length.capitalize()} seen", seen, supervised),
        ("Speed", units.count(_speed(run)), f"{length}/s" if run.crossvalidates else f"{length}/s, median"),
        ("Peak memory", units.size(run.peak_bytes), memory),
        ("Trained", units.count(model.get("trainable")), trained),
    ]


def scores(run: RunRecord) -> list[dict[str, Any]]:
    """Rows of the table of scores: `name`, `label`, a text for each of COLUMNS, `interval`, what the difference is
    worth, and whether the row is `folded`."""
    known: score_titles.Titles = {"loss": (f"Loss, {run.unit}", "low"), **run.titles}
    measured = dict.fromkeys(name for scores in run.scores.values() for name in scores)
    shown = [name for name in measured if not score_files.is_bound(name)]
    folds = len(shown) > MOST_SCORES
    order = {score: place for place, score in enumerate(known)}
    rows = []
    for name in sorted(shown, key=lambda name: order.get(name, order.get(name.partition("[")[0], len(order)))):
        base, *names = name.replace("]", "").split("[")
        if name in known or base not in known:
            label, better = known.get(name, (name, None))
        else:
            title, better = known[base]
            label = ", ".join([title.partition(",")[0], *names])
        difference, chance = run.difference(name), run.chance(name)
        row: dict[str, Any] = {when: units.number(run.scores.get(when, {}).get(name)) for when in COLUMNS}
        row |= {"name": name, "label": label, "difference": "", "chance": "", "judged": ""}
        row |= {"interval": run.interval(name), "folded": folds and base in DETAILS}
        if difference is not None:
            row["difference"] = units.signed(difference)
            row["chance"] = f"± {units.number(chance)}" if chance is not None else ""
            if better is not None and difference:
                word = "better" if (difference < 0) == (better == "low") else "worse"
                row["judged"] = "may be chance" if run.may_be_chance(name) else word
        row["chance"] = "; ".join(each for each in (row["interval"], row["chance"]) if each)
        rows.append(row)
    return rows


def _samples(predictions: pd.DataFrame, pictures: pd.DataFrame) -> list[tuple[str, list[dict[str, Any]]]]:
    """The best, the worst and some other answers after training, each row at most once, with its `pictures`."""
    names = next((names for names in (("f1", "rouge_l"), ("wer", "cer")) if f"{names[0]}_after" in predictions), None)
    if predictions.empty or names is None:
        return []
    ranked = predictions.sort_values([f"{each}_after" for each in names], ascending=names[0] == "wer", kind="stable")
    rows = ranked.to_dict("records")
    for row in rows:
        row["scored"] = {when: f"{names[0].upper()} {row[f'{names[0]}_{when}']:.2f}" for when in ("before", "after")}
    best, rest = rows[:SAMPLES], rows[SAMPLES:]
    worst, rest = rest[::-1][:SAMPLES], rest[: max(0, len(rest) - SAMPLES)]
    others = random.Random(0).sample(rest, min(SAMPLES, len(rest)))
    groups = [("Best answers", best), ("Worst answers", worst), ("Answers picked at random", others)]
    shown = [*best, *worst, *groups[-1][1]]
    beside = picture_section.beside_rows(pictures, [row["row"] for row in shown])
    for row in shown:
        row["pictures"] = beside[row["row"]]
    return [(title, group) for title, group in groups if group]


def _model_facts(run: RunRecord) -> list[tuple[str, str]]:
    model = run.manifest.get("model")
    if not model:
        return []
    adapter = run.config.get("adapter", {})
    settings = ", ".join(f"{key} {value}" for key, value in adapter.items() if key != "method")
    return [
        ("Backbone", f"{model['id']}, {units.count(model['parameters'])} parameters"),
        ("Weights", f"{model['weights']}, {units.size(model['weight_bytes'])}"),
        ("Computed in", model["compute"]),
        ("Attention", model["attention"]),
        ("Method", f"{_method(run)} ({settings})" if settings else _method(run)),
        ("Trained", f"{model['trainable']:,} parameters ({units.percent(_trained_share(run))})"),
    ]


def _trained_share(run: RunRecord) -> float | None:
    model = run.manifest.get("model", {})
    return model["trainable"] / model["parameters"] if model.get("parameters") else None


def _steps(run: RunRecord) -> str:
    """Steps that were done, as the report counts them."""
    if not run.crossvalidates:
        return f"{len(run.metrics):,} steps"
    return f"{sum(map(len, run.members.values())):,} steps of {len(run.members):,} adapters"


def _speed(run: RunRecord) -> float | None:
    """Tokens or pictures a second: the median step's, or all of a cross-validation's over its time."""
    if run.crossvalidates:
        return float(run.metrics["tokens"].sum()) / run.tokens_of_unit / run.elapsed_s if run.elapsed_s else None
    speed = run.metrics["tokens_per_second"].dropna() / run.tokens_of_unit
    return None if speed.empty else float(speed.median())


def _method(run: RunRecord) -> str:
    return str(run.config.get("adapter", {}).get("method", units.NOTHING))


def paired(records: Sequence[RunRecord], names: Sequence[str]) -> tuple[list[tuple[str, ...]], list[str]]:
    """Each run but the first against the first, on the rows that both have.

    Returns:
        A row for each score, as PAIRED_COLUMNS has it; and which losses are not compared so, or are those of some rows.
    """
    first, *others = records
    rows, notes = list[tuple[str, ...]](), list[str]()
    losses = held_out_losses.read(first.folder)
    for other, name in zip(others, names[1:], strict=True):
        scores = list(comparison.compare(first.predictions, other.predictions))
        own = held_out_losses.read(other.folder)
        if losses is not None and own is not None:
            loss = held_out_losses.compare(losses, own)
            if isinstance(loss, str):
                notes.append(f"{names[0]} and {name}: no paired difference of the loss, for {loss}.")
            else:
                scores.insert(0, loss)
                if loss.rows < own.rows:
                    notes.append(f"{name}: the paired loss is of {loss.rows:,} rows of {own.rows:,}, evenly spaced.")
        elif losses is not None or own is not None:
            without = names[0] if losses is None else name
            notes.append(f"{names[0]} and {name}: no paired difference of the loss, for {without} keeps none of rows.")
        rows += [paired_row(name, each) for each in scores]
    return rows, notes


def paired_row(name: str, score: PairedScore) -> tuple[str, ...]:
    """A score of the run `name` beside that of another, as PAIRED_COLUMNS has it."""
    p, (low, high) = score.p, score.interval or (None, None)
    chance = units.NOTHING if p is None else f"{p:.4f}" if p >= _LEAST else f"< {_LEAST}"
    bounds = units.NOTHING if low is None or high is None else f"{low:+.4f} to {high:+.4f}"
    means = f"{score.first:.4f}", f"{score.second:.4f}", f"{score.difference:+.4f}"
    return name, score.name.replace("_", " "), f"{score.rows:,}", *means, bounds, chance


def paired_note(rows: Sequence[Sequence[str]]) -> str:
    """The sentence below the table of `paired`."""
    many = f" p is of one comparison: of {len(rows)}, a small one comes by chance more often than it says."
    return PAIRED_NOTE + (many if len(rows) > 2 else "")


@dataclass(frozen=True)
class _Measure:
    """One row of the comparison."""

    label: str
    value: Callable[[RunRecord], Any]
    format: Callable[[Any], str] = str
    better: Literal["low", "high", None] = None

    def shown(self, run: RunRecord) -> str:
        value = self.value(run)
        return units.NOTHING if value is None else self.format(value)

    def best(self, runs: Sequence[RunRecord]) -> frozenset[int]:
        """Which of the runs that are done are best in this; none where all of them are alike."""
        done = {index: self.value(run) for index, run in enumerate(runs) if run.manifest.get("status") == "done"}
        values = {index: value for index, value in done.items() if value is not None}
        if self.better is None or len(set(map(self.format, values.values()))) < 2:
            return frozenset()
        best = min(values.values()) if self.better == "low" else max(values.values())
        return frozenset(index for index, value in values.items() if value == best)


def _score(when: str, name: str) -> Callable[[RunRecord], float | None]:
    return lambda run: run.scores.get(when, {}).get(name)


def _cost(who: str, name: str) -> Callable[[RunRecord], float | None]:
    return lambda run: run.costs.get(who, {}).get(name)


def _of_metrics(records: Sequence[RunRecord]) -> list[_Measure]:
    """The scores that runs name by `evaluate.metric`, where they are no scores of all."""
    return [
        _Measure(label, _score(*place), units.number, better)
        for place, (label, better) in _named_metrics(records).items()
        if place not in _COMPARED
    ]


def _named_metrics(records: Sequence[RunRecord]) -> dict[tuple[str, str], tuple[str, Literal["low", "high"]]]:
    judges = {one.judge.name: one.judge for one in records if one.judge is not None}
    return {
        (when, name): (f"{before}{judge.title}{after}", "high" if judge.higher else "low")
        for name, judge in judges.items()
        for when, before, after in (("after", "", " after"), ("test", "test ", ""))
    }


def _of_sets(records: Sequence[RunRecord]) -> list[_Measure]:
    """The same scores of each of several named sets."""
    names = dict.fromkeys(name for one in records for when in ("after", "test") for name in one.scores.get(when, {}))
    return [
        _Measure(f"{label}, {of.removesuffix(']')}", _score(when, name), units.number, better)
        for (when, score), (label, better) in (_named_metrics(records) | _COMPARED).items()
        for name in names
        for base, _, of in [name.rpartition("[")]
        if base == score
    ]


_COMPARED: dict[tuple[str, str], tuple[str, Literal["low", "high"]]] = {
    ("after", "loss"): ("held-out loss after", "low"),
    ("after", "f1"): ("F1 after", "high"),
    ("after", "rouge_l"): ("answer ROUGE-L after", "high"),
    ("after", "wer"): ("word error rate after", "low"),
    ("after", "cer"): ("character error rate after", "low"),
    ("after", "accuracy"): ("accuracy after", "high"),
    ("after", "macro_f1"): ("macro-F1 after", "high"),
    ("after", "micro_f1"): ("micro-F1 after", "high"),
    ("after", "rmse"): ("root mean squared error after", "low"),
    ("after", "ndcg@10"): ("nDCG at 10 after", "high"),
    ("after", "spearman"): ("rank correlation after", "high"),
    ("after", "reward"): ("mean reward after", "high"),
    ("test", "loss"): ("test loss", "low"),
    ("test", "accuracy"): ("test accuracy", "high"),
    ("test", "macro_f1"): ("test macro-F1", "high"),
    ("test", "micro_f1"): ("test micro-F1", "high"),
    ("test", "rmse"): ("test root mean squared error", "low"),
    ("test", "reward"): ("test mean reward", "high"),
}
"""Scores that runs are compared by, with label and direction."""
_MEASURES = (
    _Measure("status", lambda run: run.manifest.get("status")),
    _Measure("model", lambda run: run.manifest.get("model", {}).get("id")),
    _Measure("method", _method),
    _Measure("steps", lambda run: len(run.metrics), "{:,}".format),
    _Measure("tokens seen", lambda run: float(run.metrics["tokens"].sum()), units.count),
    _Measure("held-out loss before", _score("before", "loss"), units.number),
    *(_Measure(label, _score(*name), units.number, better) for name, (label, better) in _COMPARED.items()),
    *(
        _Measure(f"{who}: {cost.title}", _cost(who, name), cost.shown, cost.better)
        for who in ("student", "teacher")
        for name, cost in cost_table.COSTS.items()
    ),
    _Measure("trained parameters", lambda run: run.manifest.get("model", {}).get("trainable"), units.count),
    _Measure("tokens or pictures/s, median", _speed, units.count, "high"),
    _Measure("peak memory", lambda run: run.peak_bytes, units.size, "low"),
    _Measure("time", lambda run: run.elapsed_s, units.duration),
)
