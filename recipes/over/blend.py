"""Several cross-validations over the same folds as one run, which `predict` and `evaluate` take.

Weights and regressions are fitted to what the parts say out of fold, and judged on folds that they were not fitted to.

Legend: P parts, N labelled rows, T test rows, C outputs (classes, or 1 for a number).
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from workbench import report
from workbench.config import RunConfig
from workbench.crossval import blends, ensembles, gains, prediction
from workbench.crossval.blends import HOWS, Blend
from workbench.crossval.gains import Gain
from workbench.crossval.prediction import OUT_OF_FOLD
from workbench.crossval.stages import JudgedLabels, Predictions, StageLog
from workbench.data.labelled.labels import Floats, Label, Labels
from workbench.errors import ConfigError
from workbench.evaluation import chosen_metric, classification_scores
from workbench.evaluation.classification_scores import OneHot
from workbench.models import classifier
from workbench.runs import files, run_directory
from workbench.runs.resume_command import finish
from workbench.runs.run_directory import Run
from workbench.runs.trust import Trust
from workbench.training.callbacks import Callback

Scores = dict[str, Any]
TITLES = {"mean": "Equal weights", "greedy": "Greedy weights", "convex": "Convex weights", "stacking": "Stacking"}
_ROWS_DECIDED = ("data.seed", "data.limit", "folds.k", "folds.repeats", "folds.group", "folds.column", "folds.time")
"""Settings that decide which rows are in which fold."""
SHOWN = 3
"""Rows that a message names."""


class BlendPart(NamedTuple):
    """A finished cross-validation."""

    run: Path
    config: RunConfig
    labels: Labels
    table: pd.DataFrame
    """Out-of-fold rows by their `place`, in the order of the first part; one for each repeat."""

    @property
    def seeded(self) -> dict[str, Any]:
        """What decides its rows and folds."""
        values = self.config.model_dump(mode="json")
        found = {key: values[key.split(".")[0]][key.split(".")[1]] for key in _ROWS_DECIDED}
        return found | {"data.seed": self.config.rows_seed}


class PartWorth(NamedTuple):
    """What a part is worth."""

    run: Path
    scores: Scores
    """Of the part alone, out of fold."""
    weight: float | None
    """None: a regression reads it."""
    gain: Gain
    """From the blend of the other parts to that of all, each fold by what was fitted to the others."""


class Blended(NamedTuple):
    """What a blend is, and what it says out of fold."""

    kept: Blend
    title: str
    scores: Scores
    """As in scores.json."""
    parts: list[PartWorth]


def read_parts(runs: Sequence[Path], *, trust: Trust) -> list[BlendPart]:
    """The parts of a blend. It reads rows as the first of them does; those that read pictures come first.

    Raises:
        ConfigError: They cannot be blended.
    """
    if len(runs) < 2:
        raise ConfigError("blend takes two runs or more, over the same folds. Write workbench blend RUN RUN --out RUN.")
    if twice := [run for run, times in Counter(each.resolve() for each in runs).items() if times > 1]:
        raise ConfigError(f"{twice[0]} is named twice. Name each run once.")
    parts = [_read(run, trust) for run in runs]
    parts.sort(key=lambda part: not part.config.reads_pictures)  # whoever reads pictures also has the other columns
    first, *others = parts
    for each in others:
        _require_alike(first, each)
    for each in others:
        if each.config.reads_pictures and each.config.image.column != first.config.image.column:
            raise ConfigError(
                f"{each.run} reads pictures from the column `{each.config.image.column}`, and {first.run} from "
                f"`{first.config.image.column}`. Blend runs that read the same pictures."
            )
    aligned = [each._replace(table=each.table.loc[first.table.index]) for each in parts]
    for each in aligned[1:]:
        _require_same_rows(aligned[0], each)
    return aligned


def _read(run: Path, trust: Trust) -> BlendPart:
    config = run_directory.shipped_config(run, trust)
    if not config.crossvalidates:
        folds = config.over is not None and config.over.folds
        why = "has no one label a row" if folds else "has no predictions out of fold"
        raise ConfigError(
            f"{run}: a run of recipe={config.recipe} of={config.task.name} {why}. Blend runs of recipe=crossval "
            "of=classify."
        )
    if not (run / "decision.json").exists() or not (run / OUT_OF_FOLD).exists():
        raise ConfigError(f"{run}: the cross-validation has not ended. Continue it: {finish(run)}")
    table = pd.read_parquet(run / OUT_OF_FOLD)
    names = [os.path.basename(place) for place in table["row"]]  # the file may be named from another folder
    once = [place for place, repeat in zip(names, table["repeat"], strict=True) if repeat == table["repeat"].iloc[0]]
    table["place"] = names if len({*once}) == len(once) else table["row"]
    return BlendPart(run, config, classifier.read_labels(run), table.set_index(["repeat", "place"]))


def _require_alike(first: BlendPart, other: BlendPart) -> None:
    """Refuse parts that learnt other things, or other rows."""
    pair = f"{other.run} and {first.run}"
    if (first.labels.kind, {*first.labels.names}) != (other.labels.kind, {*other.labels.names}):
        kinds = " and ".join(f"{each.labels.kind} ({_some(each.labels.names)})" for each in (other, first))
        raise ConfigError(f"{pair} predict other things: {kinds}. Blend runs with the same classes.")
    rows, others = ({*each.table.index} for each in (first, other))
    if rows != others:
        lacking, more = (_some([place for _, place in sorted(each)]) for each in (rows - others, others - rows))
        raise ConfigError(
            f"{pair} have other rows: {len(rows - others)} that the first lacks ({lacking}), {len(others - rows)} that "
            f"only it has ({more}).{_cure(first, other)}"
        )


def _require_same_rows(first: BlendPart, other: BlendPart) -> None:
    """Refuse parts with other labels or folds of the same rows."""
    pair, one, two = f"{other.run} and {first.run}", first.table, other.table
    differ = [str(a) != str(b) for a, b in zip(map(label_of, two["label"]), map(label_of, one["label"]), strict=True)]
    if any(differ):
        place = differ.index(True)
        raise ConfigError(
            f"{pair} have other labels in {sum(differ)} rows: {one.index[place][1]} is `{two['label'].iloc[place]}` "
            f"and `{one['label'].iloc[place]}`. Train both on the same file."
        )
    for repeat in dict.fromkeys(one.index.get_level_values("repeat")):
        dealt = [pd.factorize(each.loc[[repeat], "fold"])[0] for each in (one, two)]
        if (moved := dealt[0] != dealt[1]).any():
            raise ConfigError(
                f"{pair} have other folds: {int(moved.sum())} of {len(moved)} rows stand in another one, so that what "
                f"one says out of fold the other has trained on.{_cure(first, other)}"
            )


def _cure(first: BlendPart, other: BlendPart) -> str:
    """What to write, so that another part has the rows and folds of the first."""
    then, now = first.seeded, other.seeded
    words = [f"{key}={_word(then[key])}" for key in then if then[key] != now[key]]
    return (
        f" Train {other.run} again as {first.run}: {' '.join(map(shlex.quote, words))}"
        if words
        else " Train both on the same file, with the same settings of data, duplicates and folds."
    )


def _word(value: Any) -> str:
    return "null" if value is None else str(value)


def label_of(value: Any) -> Label:
    """A label as a table holds it."""
    return tuple(map(str, value)) if isinstance(value, (list, np.ndarray)) else value


def values_of(labels: Labels, table: pd.DataFrame) -> Floats:
    """Values (N, C) of a table of predictions."""
    columns = ["predicted"] if labels.kind == "number" else [f"p_{name}" for name in labels.names]
    return np.asarray(table[columns], dtype=np.float64)


def write(run: Run, config: RunConfig, parts: Sequence[BlendPart], *, way: str, callback: Callback) -> Blended:
    """Choose how the parts become one answer, and write all files of the blend."""
    first = parts[0]
    labels, once = (
        replace(first.labels, metric=config.evaluate.judge, shift=()),
        first.table.loc[[first.table.index[0][0]]],
    )
    targets_NC, fold_N = labels.targets([label_of(each) for each in once["label"]]), once["fold"].to_numpy()
    cluster_N = once["cluster"].to_numpy()
    repeats = len(first.table) // len(once)
    # Of several repeats the mean: each was said by adapters that had not seen the row.
    values_PNC = np.stack([values_of(labels, each.table).reshape(repeats, len(once), -1).mean(0) for each in parts])
    chosen_metric.require(labels, labels.true(targets_NC), rows="out-of-fold")
    data = JudgedLabels(labels, targets_NC, cluster_N)
    log = stage_log(run, data, callback, way=way)
    kept, values_NC = choose(log, [str(each.run) for each in parts], values_PNC, fold_N, way=way)
    judged = partial(blends.out_of_fold, kept.how, labels, targets_NC=targets_NC, fold_N=fold_N)
    worth = []
    for place, part in enumerate(parts):
        others_PNC = np.delete(values_PNC, place, axis=0)
        without_NC, with_NC = (judged(each) for each in (others_PNC, values_PNC))
        gain = gains.gain(labels, without_NC, with_NC, targets_NC, groups_N=cluster_N)
        alone = classification_scores.value_scores(labels, values_PNC[place], targets_NC)
        worth.append(
            PartWorth(part.run, alone, None if kept.coef_CF is not None else float(kept.weights_P[place]), gain)
        )

    files.write_json(run.path / "decision.json", {"blend": kept.facts, "parts": [_facts(run, each) for each in parts]})
    files.write_json(run.path / "classes.json", labels.facts)
    table = _told(labels, once.reset_index(), values_NC).drop(columns="place").assign(repeat=0)
    files.write_bytes(run.path / OUT_OF_FOLD, table.to_parquet())
    baseline_NC = labels.values(classification_scores.baseline(labels, targets_NC, rows=len(targets_NC)))
    scores: Scores = {
        name: classification_scores.value_scores(labels, each_NC, targets_NC)
        | chosen_metric.bounds(labels, each_NC, labels.true(targets_NC))
        for name, each_NC in {"before": baseline_NC, "after": values_NC}.items()
    }
    if tests := _tests(parts):
        told_TC = kept.values(labels, np.stack([values_of(labels, each) for each in tests]))
        table = _told(labels, tests[0].reset_index(drop=True), told_TC)
        true_TC = labels.targets([label_of(each) for each in table["label"]])
        scores["test"] = classification_scores.value_scores(labels, told_TC, true_TC) | chosen_metric.bounds(
            labels, told_TC, labels.true(true_TC)
        )
    files.write_bytes(run.path / "predictions.parquet", table.to_parquet())
    files.write_json(run.path / "scores.json", scores)
    told = [
        {"run": str(w.run), "weight": w.weight, "alone": w.scores, "worth": asdict(w.gain), "why": w.gain.sentence}
        for w in worth
    ]
    log.write(
        folds=(folds := fold_scores(labels, values_NC, targets_NC, fold_N)), summary=fold_spread(folds), parts=told
    )
    run.note(data=files.read_json(first.run / "manifest.json").get("data"), status="done")
    report.write(run.path)
    return Blended(kept, TITLES.get(kept.how, "The best part alone"), scores, worth)


def stage_log(run: Run, data: JudgedLabels, callback: Callback, *, way: str) -> StageLog:
    """The books of a blend; without a `way`, those that fit something share the error rate."""
    return StageLog(run, data, callback, gates=len(TITLES) - 1 if way == "auto" else 1, resumes=False)


def choose(
    log: StageLog, names: Sequence[str], values_PNC: Floats, fold_N: NDArray[Any], *, way: str
) -> tuple[Blend, Floats]:
    """The blend that stays, and its values (N, C) out of fold, each fold's by what was fitted to the others.

    Equal weights stay for any gain over the best part, as they are fitted to nothing, and what is fitted for a sure
    one. A temperature follows, kept for any gain as in a cross-validation.
    """
    labels, targets_NC = log.data.labels, log.data.rows.targets_NC
    judged = partial(blends.out_of_fold, labels=labels, values_PNC=values_PNC, targets_NC=targets_NC, fold_N=fold_N)
    kept, values_NC = blends.fit("best", labels, values_PNC, targets_NC), judged("best")
    best = Path(names[int(kept.weights_P.argmax())]).name
    log.begin("best", f"Best part: {best}", Predictions(values_NC, None))
    for how in (how for how in HOWS[1:] if way in ("auto", how)):
        tried, tried_NC = blends.fit(how, labels, values_PNC, targets_NC), judged(how)
        weights = dict(zip(names, tried.weights_P.tolist(), strict=True))
        if log.offer(
            *(how, TITLES[how], Predictions(tried_NC, None), {} if tried.coef_CF is not None else {"weights": weights}),
            sure=0.0 if how == "mean" else gains.SURE,
            forced=way == how,
            how=f"--way {how}",
        ):
            kept, values_NC = tried, tried_NC
    if labels.kind == "number" or kept.coef_CF is not None:
        return kept, values_NC
    outputs_NC = classification_scores.outputs_of_values(labels, values_NC)
    heated_NC = ensembles.cross_fitted(
        fold_N,
        lambda mask_N: ensembles.temperature(labels, outputs_NC[mask_N], targets_NC[mask_N]),
        lambda heat, mask_N: ensembles.tempered(labels, values_NC[mask_N], heat),
    )
    heat = ensembles.temperature(labels, outputs_NC, targets_NC)
    if log.offer(
        "calibration",
        "Calibration",
        Predictions(heated_NC, None),
        {"temperature": heat},
        sure=0.0,
        how=None,
        by_loss=True,
    ):
        return replace(kept, temperature=heat), heated_NC
    return kept, values_NC


def _facts(run: Run, part: BlendPart) -> dict[str, Any]:
    """Where a part stands as seen from the blend, so that both may be moved together, and what it is."""
    return {"run": os.path.relpath(part.run.resolve(), run.path.resolve()), "files": prediction.digests(part.run)}


def _told(labels: Labels, table: pd.DataFrame, values_NC: Floats) -> pd.DataFrame:
    """A table of predictions with other values."""
    said = [list(each) if isinstance(each, tuple) else each for each in labels.predicted(values_NC)]
    names = () if labels.kind == "number" else labels.names
    return table.assign(predicted=said, **{f"p_{name}": values_NC[:, c] for c, name in enumerate(names)})


def _tests(parts: Sequence[BlendPart]) -> list[pd.DataFrame]:
    """What the parts said of their test rows, where these are the same with the same labels; else nothing."""
    if any(each.config.data.test is None for each in parts):
        return []
    tables = [pd.read_parquet(each.run / "predictions.parquet") for each in parts]
    rows = [
        [(os.path.basename(p), str(label_of(x))) for p, x in zip(t["row"], t["label"], strict=True)] for t in tables
    ]
    return tables if all(each == rows[0] for each in rows) else []


def fold_scores(labels: Labels, values_NC: Floats, targets_NC: OneHot, fold_N: NDArray[Any]) -> list[dict[str, Any]]:
    """Scores of each fold, by what was fitted to the others."""
    records = []
    for name in dict.fromkeys(fold_N):
        mask_N = fold_N == name
        rows = {"train_rows": int((~mask_N).sum()), "rows": int(mask_N.sum())}
        scores = classification_scores.value_scores(labels, values_NC[mask_N], targets_NC[mask_N])
        records.append({"member": f"fold-{name}", "repeat": 0, "fold": str(name), "seed": 0, **rows, "scores": scores})
    return records


def fold_spread(folds: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    plain = [{name: x for name, x in each["scores"].items() if not name.endswith(("_low", "_high"))} for each in folds]
    train, rows = (float(np.mean([each[key] for each in folds])) for key in ("train_rows", "rows"))
    return gains.fold_summary(plain, train_rows=train, test_rows=rows)


def _some(names: Sequence[Any]) -> str:
    return ", ".join(map(str, names[:SHOWN])) + (", ..." if len(names) > SHOWN else "") if names else "none"
