"""The section of a page on a cross-validation: its verdict, stages, folds, duplicates and calibration.

Expects `why` of a stage to be a sentence, and the places of a conflict to name file and row.

Legend: N rows, C classes, P predictions, B bins of probability.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

from workbench.config.task_facts import task_of
from workbench.evaluation.metrics import BINS
from workbench.evaluation.prediction_table import class_names, hot
from workbench.report import rendering, score_titles
from workbench.report.plots import COLOURS, Axis, Floats, Plot, Series, draw
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


class StageLine(NamedTuple):
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
    passes: str
    """How many times as much a later prediction costs while the stage is kept."""
    facts: rendering.FactList


class FoldTable(NamedTuple):
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
    gains: Plot | None
    """What each stage made of the main score; None where there is one stage."""
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
        score=run.titles.get(main, (_named(main),))[0] if main else "Score",
        stages=stages(run),
        gains=gains(run),
        tested=any(stage.get("test") for stage in _done(run)),
        folds=_folds(run) if run.stages.get("folds") else None,
        duplicates=_duplicates(duplicate_facts) if duplicate_facts else [],
        conflicts=[", ".join(places) for places in conflicts[:CONFLICTS]],
        more_conflicts=max(0, len(conflicts) - CONFLICTS),
        calibration=reliability_diagram(run),
    )


def main_score(run: RunRecord) -> str | None:
    """The name of the score that the run is judged by; None before anything was scored."""
    if not run.classifies:
        task = task_of(run.config)
        names = (*(() if task is None else (task.score,)), *MAIN, "loss")
        return next((name for name in names if name in (run.scores.get("after") or {})), None)
    measured = [run.scores.get("after") or {}, *(stage.get("oof") or {} for stage in _done(run))]
    known = [*([run.judge.name] if run.judge else []), *MAIN]
    return next((name for scores in measured for name in known if name in scores), None)


def main_title(run: RunRecord, main: str | None) -> str:
    """What sentences call the main score."""
    if run.judge is not None and main == run.judge.name:
        return run.judge.title
    return MAIN.get(main or "", main or "score")


def stages(run: RunRecord) -> list[StageLine]:
    """The stages that are done, in their order."""
    main, lines = main_score(run) or "", []
    for stage, before in _compared(run):
        oof, gain, test = stage.get("oof") or {}, stage.get("gain") or {}, stage.get("test") or {}
        now, then = oof.get(main), (before.get("oof") or {}).get(main)
        facts = {name: fact for name, fact in (stage.get("facts") or {}).items() if name != "gain"}
        line = StageLine(
            title=_title(stage),
            kept=bool(stage.get("accepted")),
            why=stage.get("why") or "",
            loss=units.loss(oof.get("loss")),
            change=_signed(gain.get("difference")),
            chance=_chance(gain),
            score=units.number(now),
            score_change=units.NOTHING if now is None or then is None else units.signed(now - then),
            test=(units.loss(test.get("loss")), units.number(test.get(main))),
            seconds=units.duration(stage.get("seconds")),
            passes=f"{stage.get('passes', 1):.2g}x",
            facts=rendering.fact_list(facts),
        )
        lines.append(line)
    return lines


def gains(run: RunRecord) -> Plot | None:
    """The main score after each stage, out of fold and on test: what stays, and what stages would have made of it that
    were not kept. None where there are no two stages with it."""
    main = main_score(run) or ""
    done = [stage for stage in _done(run) if main in (stage.get("oof") or {})]
    if len(done) < 2:
        return None
    series = []
    for colour, (rows, label) in enumerate((("oof", "out of fold"), ("test", "test"))):
        kept, refused, now = [], [], np.nan
        for stage in done:
            value = (stage.get(rows) or {}).get(main, np.nan)
            now = value if stage.get("accepted") else now
            kept.append(now)
            refused.append(np.nan if stage.get("accepted") else value)
        x = np.arange(len(done), dtype=float)
        if np.isfinite(kept).any():
            series.append(Series(label, x, np.array(kept), "marked", colour))
        if np.isfinite(refused).any():
            series.append(Series(f"{label}, not kept", x, np.array(refused), "points", colour + 2))
    costs = [f"{at} {_title(stage)} ({units.duration(stage.get('seconds'))})" for at, stage in enumerate(done)]
    title = f"{_named(main)} from stage to stage"
    return draw(title, series, x=Axis("stage", "count"), y=Axis(), caption=f"{', '.join(costs)}.", wide=True)


def verdict(run: RunRecord) -> str:
    """Outcome of the run in one sentence, from its numbers."""
    main = main_score(run)
    if main is None:
        measured = {name: units.number(value) for name, value in run.scores["after"].items() if "_" not in name}
        return f"Out of fold: {', '.join(f'{name} {value}' for name, value in measured.items())}."
    before, after = run.scores["before"], run.scores["after"]
    summary = (run.stages.get("summary") or {}).get(main)
    sure = _interval(after, main) or (f" (95 %: {_bounds(summary)})" if summary else "")
    folds = run.stages.get("folds") or []
    first = [
        fold["rows"] for fold in folds if fold["repeat"] == folds[0]["repeat"] and fold["seed"] == folds[0]["seed"]
    ]
    rows = len(run.labelled) if run.classifies else sum(first)
    sentence = f"Out-of-fold {main_title(run, main)} {units.number(after[main])}{sure} on {rows:,} rows"
    if summary:
        count, repeats, seeds = (len({fold[name] for fold in folds}) for name in ("fold", "repeat", "seed"))
        sentence += f", spread {units.number(summary['spread'])} over {count} folds"
        sentence += f", {repeats} repeats" if repeats > 1 else ""
        sentence += f", {seeds} seeds" if seeds > 1 else ""
    if main in (nested := run.scores.get("nested") or {}):
        sentence += (
            f". Nested, the whole flow on rows that nothing in it saw: {main_title(run, main)} "
            f"{units.number(nested[main])}{_interval(nested, main)}"
        )
    if tested := _tested(run, main):
        sentence = f"{tested}. {sentence}"
    if main not in before:
        return f"{sentence}."
    if not run.classifies:
        return f"{sentence}. Before training: {units.number(before[main])}."
    guess = {"accuracy": "naming the likeliest class", "rmse": "naming the mean"}.get(main, "saying the same")
    return f"{sentence}. Always {guess} gives {units.number(before[main])}."


def _tested(run: RunRecord, main: str) -> str:
    """The score on test rows in words, without a full stop; empty where there are none."""
    test, refit, said = run.scores.get("test") or {}, run.scores.get("refit") or {}, ""
    if main in test:
        rows = (run.manifest.get("data", {}).get("test") or {}).get("rows")
        where = f"{rows:,} test rows" if rows else "the test rows"
        of_sets = [
            f"{name[len(main) + 1 : -1]} {units.number(value)}"
            for name, value in test.items()
            if name.startswith(f"{main}[")
        ]
        each = f" ({', '.join(of_sets)})" if of_sets else ""
        who = "all adapters together" if run.classifies or not run.stages.get("refits") else "the adapter of all rows"
        value = f"{main_title(run, main)} {units.number(test[main])}{_interval(test, main)}"
        said = f"{value[0].upper()}{value[1:]} on {where}{each} by {who}"
    if main in refit:
        said += f" and {units.number(refit[main])} by one adapter that trained on all rows"
        sign = 1 if run.titles.get(main, ("", "low"))[1] == "high" else -1
        if main in test and sign * refit[main] > sign * test[main]:
            said += ", which costs a fraction to serve and did better here"
    return said


def sentences(run: RunRecord) -> list[tuple[Tone, str]]:
    """Sentences on each stage and on the data."""
    main = main_score(run) or ""
    sentences = [_sentence(stage, before, main, main_title(run, main)) for stage, before in _compared(run)]
    duplicate_facts = run.stages.get("duplicates") or {}
    if duplicate_facts.get("conflicts"):
        count = len(duplicate_facts["conflicts"])
        clusters = "cluster of near-duplicates carries" if count == 1 else "clusters of near-duplicates carry"
        sentences.append(("warning", f"{count:,} {clusters} different labels; see Duplicates."))
    if leak := duplicate_facts.get("leak"):
        text = f"Grouped folds kept {leak:,} rows from being validated beside a near-duplicate that trains."
        sentences.append(("good", text))
    return sentences


def _sentence(stage: Mapping[str, Any], before: Mapping[str, Any], main: str, named: str) -> tuple[Tone, str]:
    gain, oof, test = stage.get("gain"), stage.get("oof") or {}, stage.get("test") or {}
    kept, parts = bool(stage.get("accepted")), []
    if gain:
        parts.append(f"loss {units.loss(gain['loss_before'])} to {units.loss(gain['loss_after'])}")
        parts[0] += f" ({_signed(gain['difference'])}; 95 %: {_chance(gain)})"
    if main in oof and main in (before.get("oof") or {}):
        parts.append(f"{named} {units.number(before['oof'][main])} to {units.number(oof[main])}")
    elif main in oof:
        parts.append(f"{named} {units.number(oof[main])}")
    numbers = f": {', '.join(parts)} out of fold" if parts else ""
    numbers += f"; {units.number(test[main])} on test" if main in test else ""
    return "good" if kept and gain else "plain", f"{_title(stage)}, {'kept' if kept else 'not kept'}{numbers}."


def progress(run: RunRecord) -> str:
    """How far a run without scores came: the end of a sentence."""
    # stages.json comes at the end; the manifest notes each stage's time when it is done.
    done = [_title(stage) for stage in _done(run)] or [
        name.replace("_", " ") for name in run.manifest.get("seconds", {})
    ]
    return f"; stages done: {', '.join(done)}" if done else "; no stage is done"


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


def _named(score: str) -> str:
    """The name of a score as a heading."""
    return score_titles.CLASSES[score][0] if score in score_titles.CLASSES else score.replace("_", " ").capitalize()


def _signed(value: float | None) -> str:
    return units.NOTHING if value is None else f"{value:+.4f}"


def _chance(gain: Mapping[str, Any]) -> str:
    return f"{_signed(gain['low'])} to {_signed(gain['high'])}" if gain else ""


def _interval(scores: Mapping[str, float], name: str) -> str:
    low, high = (scores.get(f"{name}{end}") for end in _BOUNDS)
    return "" if low is None or high is None else f" (95 %: {units.number(low)} to {units.number(high)})"


def _bounds(bounds: Mapping[str, float]) -> str:
    return f"{units.number(bounds['low'])} to {units.number(bounds['high'])}" if "low" in bounds else units.NOTHING


def _folds(run: RunRecord) -> FoldTable:
    folds = run.stages["folds"]
    measured = dict.fromkeys(name for fold in folds for name in fold["scores"] if not name.endswith(_BOUNDS))
    names = [name for name in ("loss", *run.titles) if name in measured]
    names += [name for name in measured if name not in names and "[" not in name and not run.classifies]
    summary = run.stages.get("summary") or {}
    of_scores = [summary.get(name, {}) for name in names]
    return FoldTable(
        columns=tuple(run.titles.get(name, (_named(name),))[0] for name in names),
        rows=[
            (
                fold["member"],
                *(f"{fold['train_rows']:,}", f"{fold['rows']:,}"),
                *(units.number(fold["scores"].get(name)) for name in names),
            )
            for fold in folds
        ],
        summary=[
            ("Mean", *(units.number(each.get("mean")) for each in of_scores)),
            ("Spread", *(units.number(each.get("spread")) for each in of_scores)),
            ("95 %", *map(_bounds, of_scores)),
        ]
        if summary
        else [],
        plot=_fold_plot(run, main_score(run) or "loss"),
    )


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
    summary = (run.stages.get("summary") or {}).get(score, {})
    caption = ", ".join(f"{place} is {name}" for name, place in places.items() if name != str(place))
    caption = f"Folds by number: {caption}. " if caption else ""
    if summary:
        caption += f"Dashed: the mean, {units.number(summary['mean'])}, and its 95 % interval, {_bounds(summary)}."
    title = f"{_named(score)} of each fold"
    marks = tuple(summary[name] for name in ("low", "mean", "high") if np.isfinite(summary.get(name, np.nan)))
    return draw(title, series, x=Axis("fold", "count"), y=Axis(marks=marks), caption=caption, wide=True)


def _duplicates(values: Mapping[str, Any]) -> list[tuple[str, str]]:
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
        ("Left out", rendering.in_words(values["left_out"])),
    ]


def reliability_diagram(run: RunRecord) -> Plot | None:
    """Predicted probability against the share that is right; None without classes, empty before there are rows.

    out_of_fold.parquet holds the outputs after all stages, so a temperature that was kept is undone for the other
    line. That is exact where one adapter speaks for a row, and nearly so for a mean of several.
    """
    kind = run.config.get("classes", {}).get("kind", "one")
    if kind == "number" or not run.classifies:
        return None
    predictions, several = run.labelled, kind == "several"
    if predictions.empty:
        return draw("Calibration", [], x=Axis(), y=Axis())
    names = class_names(predictions)
    p_NC, true_NC = predictions[[f"p_{name}" for name in names]].to_numpy(np.float64), hot(predictions["label"], names)
    lines = [("as it stands", p_NC)]
    stage = next((stage for stage in _done(run) if stage.get("name") == "calibration"), {})
    temperature = (stage.get("facts") or {}).get("temperature")
    if temperature is not None:
        kept = bool(stage.get("accepted"))
        other_NC = tempered(p_NC, 1 / temperature if kept else temperature, several=several)
        label = "without the temperature" if kept else "with the temperature that was not kept"
        lines.append((f"{label}, {units.number(temperature)}", other_NC))
    series = [Series("always keeps its word", np.array([0.0, 1.0]), np.array([0.0, 1.0]), "faint", 7)]
    gaps = []
    for colour, (label, p_NC) in enumerate(lines):
        if several:
            x_B, y_B, gap = reliability_bins(p_NC.ravel(), true_NC.ravel())
        else:
            x_B, y_B, gap = reliability_bins(p_NC.max(1), true_NC[np.arange(len(p_NC)), p_NC.argmax(1)])
        series.append(Series(label, x_B, y_B, "marked", colour))
        gaps.append(f"{units.number(gap)} {label}")
    return draw(
        "Calibration",
        series,
        x=Axis("probability of a class" if several else "probability of the likeliest class"),
        y=Axis("share that is right"),
        caption=f"Mean distance to the diagonal, in {BINS} bins: {'; '.join(gaps)}.",
        wide=True,
    )


def tempered(p_NC: Floats, temperature: float, *, several: bool) -> Floats:
    """The probabilities that outputs divided by `temperature` would give."""
    tiny = np.finfo(np.float64).tiny
    logs_NC = np.log(np.maximum(p_NC, tiny))
    if several:
        scaled_NC: Floats = special.expit((logs_NC - np.log(np.maximum(1 - p_NC, tiny))) / temperature)
    else:
        scaled_NC = special.softmax(logs_NC / temperature, axis=1)
    return scaled_NC


def reliability_bins(p_P: Floats, right_P: NDArray[np.bool_]) -> tuple[Floats, Floats, float]:
    """Mean probability and share that is right of each bin that has predictions, and their mean gap over predictions.

    The gap is the expected calibration error of Guo et al. 2017, arXiv:1706.04599, eq. 3.
    """
    bin_P = np.minimum((p_P * BINS).astype(np.int64), BINS - 1)
    count_B = np.bincount(bin_P, minlength=BINS)
    sums = [np.bincount(bin_P, weights=values, minlength=BINS)[count_B > 0] for values in (p_P, right_P)]
    said_B, right_B = (total / count_B[count_B > 0] for total in sums)
    return said_B, right_B, float(np.abs(sums[0] - sums[1]).sum() / max(1, len(p_P)))
