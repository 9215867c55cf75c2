"""The section of a page on a cross-validation: its verdict, stages, folds and duplicates.

Expects `why` of a stage to be a sentence, and the places of a conflict to name file and row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from workbench.report import fact_table, reliability
from workbench.report.class_section import SCORES
from workbench.report.plots import COLOURS, Axis, Plot, Series, draw
from workbench.report.run_record import RunRecord
from workbench.runs import units

MAIN = {"accuracy": "accuracy", "micro_f1": "micro-F1", "rmse": "root mean squared error"}
"""The score that a kind of label is judged by, and what a sentence calls it."""
Tone = Literal["good", "warning", "plain"]
"""Tone of a `findings.Finding`."""
CONFLICTS = 10
"""Contradictory clusters that are listed."""
_BOUNDS = ("_low", "_high")
"""Ends of the names of bounds of 95 % intervals."""


@dataclass(frozen=True)
class StageLine:
    """One line of the table of stages; a number that was not measured is a dash."""

    title: str
    kept: bool
    why: str
    loss: str
    change: str
    chance: str
    """95 % interval of the change, paired over rows."""
    score: str
    score_change: str
    """Against the last stage that was kept."""
    test: tuple[str, str]
    """Loss and main score."""
    seconds: str
    facts: fact_table.FactList


@dataclass(frozen=True)
class FoldTable:
    """The table of folds, and its plot."""

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    summary: list[tuple[str, ...]]
    """Mean, spread and 95 % interval of each score, with a name in front."""
    plot: Plot


@dataclass(frozen=True)
class CrossvalSection:
    """The part of the page; a part that is not there yet is empty."""

    score: str
    """Name of the main score."""
    stages: list[StageLine]
    tested: bool
    folds: FoldTable | None
    duplicates: list[tuple[str, str]]
    conflicts: list[str]
    """The places of each cluster whose rows carry different labels, some of them."""
    more_conflicts: int
    calibration: Plot | None
    """None for numbers, which are not probabilities."""


def crossvalidated(run: RunRecord) -> CrossvalSection | None:
    """The section on folds; None where the run did not cross-validate."""
    if not run.crossvalidates:
        return None
    duplicate_facts, main = run.stages.get("duplicates") or {}, main_score(run)
    conflicts = duplicate_facts.get("conflicts", [])
    return CrossvalSection(
        score=SCORES[main][0] if main else "Score",
        stages=stages(run),
        tested=any(stage.get("test") for stage in _done(run)),
        folds=_folds(run),
        duplicates=_duplicates(duplicate_facts),
        conflicts=[", ".join(places) for places in conflicts[:CONFLICTS]],
        more_conflicts=max(0, len(conflicts) - CONFLICTS),
        calibration=reliability.diagram(run),
    )


def main_score(run: RunRecord) -> str | None:
    """The name of the score that the run is judged by; None before anything was scored."""
    measured = [run.scores.get("after") or {}, *(stage.get("oof") or {} for stage in _done(run))]
    return next((name for scores in measured for name in MAIN if name in scores), None)


def stages(run: RunRecord) -> list[StageLine]:
    """The stages that are done, in their order."""
    main = main_score(run) or ""
    return [
        StageLine(
            title=_title(stage),
            kept=bool(stage.get("accepted")),
            why=stage.get("why") or "",
            loss=units.loss((stage.get("oof") or {}).get("loss")),
            change=_moved((stage.get("gain") or {}).get("difference")),
            chance=_chance(stage.get("gain")),
            score=units.number((stage.get("oof") or {}).get(main)),
            score_change=_signed(_change(stage, before, main)),
            test=_test(stage, main),
            seconds=units.duration(stage.get("seconds")),
            facts=fact_table.fact_list(
                {name: fact for name, fact in (stage.get("facts") or {}).items() if name != "gain"}
            ),
        )
        for stage, before in _compared(run)
    ]


def verdict(run: RunRecord) -> str:
    """Outcome of the run in one sentence, from its numbers."""
    main = main_score(run)
    if main is None:
        return f"Out-of-fold loss {units.number(run.scores['after']['loss'])} {run.unit}."
    before, after = run.scores["before"], run.scores["after"]
    score_summary = (run.stages.get("summary") or {}).get(main)
    sure = _interval(after, main) or (f" (95 %: {_bounds(score_summary)})" if score_summary else "")
    sentence = f"Out-of-fold {MAIN[main]} {units.number(after[main])}{sure} on {len(run.labelled):,} rows"
    if score_summary:
        sentence += f", spread {units.number(score_summary['spread'])} over {_count(run)}"
    test = run.scores.get("test") or {}
    if main in test:
        rows = (run.manifest.get("data", {}).get("test") or {}).get("rows")
        where = f"{rows:,} test rows" if rows else "the test rows"
        sentence += f"; {units.number(test[main])}{_interval(test, main)} on {where}{_each(test, main)}"
        sentence += " by all adapters together"
    if main in (refit := run.scores.get("refit") or {}):
        sentence += f" and {units.number(refit[main])} by one adapter that trained on all rows"
    if main not in before:
        return f"{sentence}."
    guess = {"accuracy": "naming the likeliest class", "rmse": "naming the mean"}.get(main, "saying the same")
    return f"{sentence}. Always {guess} gives {units.number(before[main])}."


def _each(test: Mapping[str, float], main: str) -> str:
    """The score of each of several test sets; empty where there is one."""
    of = {name: value for name, value in test.items() if name.startswith(f"{main}[")}
    each = ", ".join(f"{name[len(main) + 1 : -1]} {units.number(value)}" for name, value in of.items())
    return f" ({each})" if each else ""


def sentences(run: RunRecord) -> list[tuple[Tone, str]]:
    """Sentences on each stage and on the data."""
    main = main_score(run) or ""
    sentences = [_sentence(stage, before, main) for stage, before in _compared(run)]
    duplicate_facts = run.stages.get("duplicates") or {}
    if duplicate_facts.get("conflicts"):
        count = len(duplicate_facts["conflicts"])
        clusters = "cluster of near-duplicates carries" if count == 1 else "clusters of near-duplicates carry"
        sentences.append(("warning", f"{count:,} {clusters} different labels; see Duplicates."))
    if duplicate_facts.get("leak"):
        leaked = f"{duplicate_facts['leak']:,} rows"
        text = f"Grouped folds kept {leaked} from being validated beside a near-duplicate that trains."
        sentences.append(("good", text))
    return sentences


def progress(run: RunRecord) -> str:
    """How far a run came that has no scores, to stand behind a sentence."""
    # stages.json comes at the end; the manifest notes each stage's time when it is done.
    done = [_title(stage) for stage in _done(run)] or [
        name.replace("_", " ") for name in run.manifest.get("seconds", {})
    ]
    return f"; stages done: {', '.join(done)}" if done else "; no stage is done"


def _sentence(stage: Mapping[str, Any], before: Mapping[str, Any], main: str) -> tuple[Tone, str]:
    gain, oof, test = stage.get("gain"), stage.get("oof") or {}, stage.get("test") or {}
    kept = bool(stage.get("accepted"))
    parts = []
    if gain:
        parts.append(f"loss {units.loss(gain['loss_before'])} to {units.loss(gain['loss_after'])}")
        parts[0] += f" ({_moved(gain['difference'])}; 95 %: {_chance(gain)})"
    if main in oof and main in (before.get("oof") or {}):
        parts.append(f"{MAIN[main]} {units.number(before['oof'][main])} to {units.number(oof[main])}")
    elif main in oof:
        parts.append(f"{MAIN[main]} {units.number(oof[main])}")
    numbers = f": {', '.join(parts)} out of fold" if parts else ""
    numbers += f"; {units.number(test[main])} on test" if main in test else ""
    return "good" if kept and gain else "plain", f"{_title(stage)}, {'kept' if kept else 'not kept'}{numbers}."


def _done(run: RunRecord) -> list[Mapping[str, Any]]:
    return run.stages.get("stages") or []


def _compared(run: RunRecord) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Each stage with the last one that was kept before it; an empty one stands before the first."""
    before: Mapping[str, Any] = {}
    for stage in _done(run):
        yield stage, before
        if stage.get("accepted") and stage.get("oof"):
            before = stage


def _title(stage: Mapping[str, Any]) -> str:
    return str(stage.get("title") or stage.get("name") or "stage")


def _change(stage: Mapping[str, Any], before: Mapping[str, Any], score: str) -> float | None:
    now, then = ((each.get("oof") or {}).get(score) for each in (stage, before))
    return None if now is None or then is None else now - then


def _signed(value: float | None) -> str:
    return units.NOTHING if value is None else units.signed(value)


def _moved(value: float | None) -> str:
    return units.NOTHING if value is None else f"{value:+.4f}"


def _chance(gain: Mapping[str, Any] | None) -> str:
    return f"{_moved(gain['low'])} to {_moved(gain['high'])}" if gain else ""


def _test(stage: Mapping[str, Any], main: str) -> tuple[str, str]:
    test_scores = stage.get("test") or {}
    return units.loss(test_scores.get("loss")), units.number(test_scores.get(main))


def _interval(scores: Mapping[str, float], name: str) -> str:
    low, high = (scores.get(f"{name}{end}") for end in _BOUNDS)
    return "" if low is None or high is None else f" (95 %: {units.number(low)} to {units.number(high)})"


def _count(run: RunRecord) -> str:
    folds = run.stages.get("folds") or []
    repeats, seeds = (len({fold[name] for fold in folds}) for name in ("repeat", "seed"))
    summary = f"{len({fold['fold'] for fold in folds})} folds"
    summary += f", {repeats} repeats" if repeats > 1 else ""
    return summary + (f", {seeds} seeds" if seeds > 1 else "")


def _folds(run: RunRecord) -> FoldTable | None:
    folds = run.stages.get("folds") or []
    if not folds:
        return None
    measured = dict.fromkeys(name for fold in folds for name in fold["scores"] if not name.endswith(_BOUNDS))
    names = [name for name in ("loss", *SCORES) if name in measured]
    summary = run.stages.get("summary") or {}
    return FoldTable(
        columns=tuple("Loss" if name == "loss" else SCORES[name][0] for name in names),
        rows=[_fold_row(fold, names) for fold in folds],
        summary=_summary(summary, names) if summary else [],
        plot=_fold_plot(run, next((name for name in MAIN if name in measured), "loss")),
    )


def _summary(summary: Mapping[str, Mapping[str, float]], names: list[str]) -> list[tuple[str, ...]]:
    summaries = [summary.get(name, {}) for name in names]
    return [
        ("Mean", *(units.number(each.get("mean")) for each in summaries)),
        ("Spread", *(units.number(each.get("spread")) for each in summaries)),
        ("95 %", *map(_bounds, summaries)),
    ]


def _fold_row(fold: Mapping[str, Any], names: list[str]) -> tuple[str, ...]:
    rows = (f"{fold['train_rows']:,}", f"{fold['rows']:,}")
    return (fold["member"], *rows, *(units.number(fold["scores"].get(name)) for name in names))


def _bounds(bounds: Mapping[str, float]) -> str:
    return f"{units.number(bounds['low'])} to {units.number(bounds['high'])}" if "low" in bounds else units.NOTHING


def _fold_plot(run: RunRecord, score: str) -> Plot:
    """One point for each member: folds side by side, seeds a little apart, repeats in colours."""
    folds = run.stages["folds"]
    places = {name: place for place, name in enumerate(dict.fromkeys(fold["fold"] for fold in folds))}
    seeds = 1 + max(fold["seed"] for fold in folds)
    series = []
    for repeat in sorted({fold["repeat"] for fold in folds}):
        own = [fold for fold in folds if fold["repeat"] == repeat]
        x = [places[fold["fold"]] + 0.3 * (fold["seed"] / seeds - (seeds - 1) / seeds / 2) for fold in own]
        y = [fold["scores"].get(score, np.nan) for fold in own]
        series.append(Series(f"repeat {repeat}", np.array(x), np.array(y, dtype=float), "points", repeat % COLOURS))
    score_summary = (run.stages.get("summary") or {}).get(score, {})
    caption = ", ".join(f"{place} is {name}" for name, place in places.items() if name != str(place))
    caption = f"Folds by number: {caption}. " if caption else ""
    if score_summary:
        caption += (
            f"Dashed: the mean, {units.number(score_summary['mean'])}, and its 95 % interval, {_bounds(score_summary)}."
        )
    title = f"{SCORES[score][0]} of each fold" if score in SCORES else "Loss of each fold"
    marks = tuple(
        score_summary[name] for name in ("low", "mean", "high") if np.isfinite(score_summary.get(name, np.nan))
    )
    return draw(title, series, x=Axis("fold", "count"), y=Axis(marks=marks), caption=caption, wide=True)


def _duplicates(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    if not values:
        return []
    rows = max(1, values["rows"])
    clusters = [
        ("Clusters of near-duplicates", f"{values['clusters']:,} with {values['clustered']:,} rows"),
        ("Largest cluster", f"{values['largest']:,} rows"),
        ("Least similar rows of a cluster", f"similarity {units.number(values['least_similar'])}"),
        ("Clusters with different labels", f"{len(values['conflicts']):,}"),
        ("Rows that ungrouped folds would leak", f"{values['leak']:,} ({units.percent(values['leak'] / rows)})"),
    ]
    return [
        ("Rows", f"{values['rows']:,}, of which {values['exact']:,} equal another one"),
        *(clusters if values["clusters"] else [("Clusters of near-duplicates", "none")]),
        ("Left out", fact_table.text(values["left_out"])),
    ]
