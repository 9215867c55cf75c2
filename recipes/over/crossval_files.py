"""Files of a cross-validation in its run directory.

Legend: M adapters, N labelled rows, C outputs (classes, or 1 for a number).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from workbench.crossval import fold_adapters, gains
from workbench.crossval.ensembles import Combiner
from workbench.crossval.fold_adapters import RoundOutputs
from workbench.crossval.prediction import OUT_OF_FOLD, OUT_OF_FOLD_MEMBERS
from workbench.crossval.tta import TtaDecision
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.data.labelled.labels import Floats, Labels
from workbench.evaluation import classification_scores, prediction_table, simple_baseline, thumbnails, training_dynamics
from workbench.evaluation.frozen_features import FrozenProbe
from workbench.models import classifier
from workbench.runs import files

if TYPE_CHECKING:
    from workbench.recipes.over.crossval_stages import CrossvalContext, Decided, KeptCorrection

Scores = dict[str, Any]
_BOUNDS = ("_low", "_high")
"""Ends of the names of bounds, of which a mean over folds says nothing."""


def write(
    context: CrossvalContext,
    round_outputs: RoundOutputs,
    combiner: Combiner,
    decision: TtaDecision | None,
    corrected: KeptCorrection | None,
    rule: Decided | None,
    refit: Scores | None,
    probed: FrozenProbe | None,
) -> Scores:
    """All files but the report; returns what stands in scores.json."""
    data, labels, predictions = context.data, context.data.labels, context.log.predictions
    shipped = labels if rule is None else rule.labels
    out_of_fold = _out_of_fold(context, round_outputs, combiner, rule)
    files.write_bytes(context.run.path / OUT_OF_FOLD, out_of_fold.to_parquet())
    members = pd.concat(_members(context, round_outputs), ignore_index=True)
    files.write_bytes(context.run.path / OUT_OF_FOLD_MEMBERS, members.to_parquet())
    once = out_of_fold[: len(data.rows)]
    near = None if probed is None else probed.write_neighbours(context.run.path, once, out_of_fold=True)
    if labels.kind in ("one", "pair"):
        suspects = prediction_table.suspect_table(once).reset_index(drop=True)
        files.write_bytes(context.run.path / "suspects.parquet", suspects.to_parquet())
    folders = fold_adapters.adapter_folders(context.run, round_outputs.number, context.members)
    training_dynamics.write_combined(context.run.path, [adapter.parent for adapter in folders], out_of_fold)
    _pictures(context, round_outputs, once, near)
    shown, values_NC = (data.rows, predictions.oof_NC)
    if data.test is not None and predictions.test_TC is not None:
        shown, values_NC = data.test, predictions.test_TC
    table = _table(context, shown, values_NC, shipped)
    if shown is data.rows:
        table["predicted"] = once["predicted"]
    files.write_bytes(context.run.path / "predictions.parquet", table.to_parquet())
    files.write_json(context.run.path / "classes.json", shipped.facts)
    if corrected is not None:
        corrected.bank.save(context.run.path)
    files.write_json(context.run.path / "decision.json", decided(context, round_outputs, combiner, decision, corrected))
    folds, summary = _folds(context, round_outputs, combiner)
    context.log.write(folds=folds, summary=summary, duplicates=_duplicates(context))
    baseline_NC = classification_scores.baseline(labels, data.rows.targets_NC, rows=len(data.rows))
    scores: Scores = {
        "before": classification_scores.scores_of(labels, baseline_NC, data.rows),
        "after": classification_scores.value_scores_of(labels, predictions.oof_NC, data.rows),
    }
    if rule is not None:  # each row by the rule that did not see it
        chosen = classification_scores.value_scores_of(labels, rule.oof_NC, data.rows)
        scores["after"] |= classification_scores.of_labels(labels, chosen)
    if data.test is not None and predictions.test_TC is not None:
        scores["test"] = classification_scores.value_scores_of(shipped, predictions.test_TC, data.test)
    if refit is not None:
        scores["refit"] = refit
    if simple_baseline.wanted(context.fold_context.config, context.run):
        splits = {each.split.fold: each.split for each in context.members if each.split.repeat == 0}
        found = simple_baseline.quick_folds(
            labels,
            data.rows,
            [(data.training(split), split.validation_N) for split in splits.values()],
            context.fold_context.reader,
            predictions.oof_NC if rule is None else rule.oof_NC,
            seed=context.fold_context.config.seed,
        )
        scores |= simple_baseline.told(found, context.run, context.callback.say)
    files.write_json(context.run.path / "scores.json", scores)
    return scores


def decided(
    context: CrossvalContext,
    round_outputs: RoundOutputs,
    combiner: Combiner,
    decision: TtaDecision | None,
    corrected: KeptCorrection | None,
) -> dict[str, Any]:
    """Decisions that predicting other rows needs."""
    fitted = context.fitted(combiner, round_outputs)
    return {
        "round": round_outputs.number,
        "members": context.names,
        "temperature": fitted.temperature,
        "how": fitted.how,
        "tta": decision.facts if decision is not None and decision.accepted else None,
        "correction": None if corrected is None else corrected.correction.facts,
    }


def _out_of_fold(
    context: CrossvalContext, round_outputs: RoundOutputs, combiner: Combiner, rule: Decided | None
) -> pd.DataFrame:
    """One line for each row and repeat; with a single repeat, by all stages that stayed."""
    repeats = context.data.folds.fold_RN
    tables = []
    for repeat, fold_N in enumerate(repeats):
        own_M = np.asarray([each.split.repeat == repeat for each in context.members])
        values_NC = (
            context.log.predictions.oof_NC
            if len(repeats) == 1
            else combiner.out_of_fold(context.known.only(own_M), round_outputs.oof_MNC)
        )
        table = _table(context, context.data.rows, values_NC, context.data.labels)
        if rule is not None and len(repeats) == 1:
            table["predicted"] = _table(context, context.data.rows, rule.oof_NC, context.data.labels)["predicted"]
        table.insert(2, "repeat", repeat)
        table.insert(3, "fold", [context.data.folds.names[fold] for fold in fold_N])
        table.insert(4, "cluster", context.data.cluster_N)
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


def _members(context: CrossvalContext, round_outputs: RoundOutputs) -> Iterator[pd.DataFrame]:
    """What each adapter alone says of the rows of its fold, before any stage merges or changes it."""
    for number, each in enumerate(context.members):
        mask_N = each.split.validation_N
        values_NC = context.data.labels.values(round_outputs.oof_MNC[number, mask_N])
        table = _table(context, context.data.rows.subset(mask_N), values_NC, context.data.labels)
        own = {"repeat": each.split.repeat, "fold": context.data.folds.names[each.split.fold]}
        yield table.assign(**own, seed=each.seed, member=each.name)


def _pictures(
    context: CrossvalContext, round_outputs: RoundOutputs, table: pd.DataFrame, near: LabelledSet | None
) -> None:
    """Pictures of the rows out of fold; the adapter of one fold explains what it says of its rows."""
    data, fold_context = context.data, context.fold_context
    if fold_context.config.media is None:
        return
    (one, *_), places = context.members, {place for cluster in data.conflicts for place in cluster}
    (folder,) = fold_adapters.adapter_folders(context.run, round_outputs.number, [one])
    thumbnails.write(
        context.run.path,
        fold_context.reader,
        data.rows,
        table,
        train=data.rows.subset(one.split.train_N),
        model=classifier.load(folder.parent, fold_context.config),
        explain=np.flatnonzero(one.split.validation_N).tolist(),
        first=[row for row, record in enumerate(data.rows.records) if record.place in places],
        near=near,
        left_out=data.disputed,
    )


def _table(context: CrossvalContext, rows: LabelledSet, values_NC: Floats, labels: Labels) -> pd.DataFrame:
    return classification_scores.predictions_table(labels, rows, values_NC, context.fold_context.reader, labelled=True)


def _folds(
    context: CrossvalContext, round_outputs: RoundOutputs, combiner: Combiner
) -> tuple[list[dict[str, Any]], dict[str, dict[str, float]]]:
    """Scores of each adapter on the rows of its fold, and how they vary."""
    labels, rows = context.data.labels, context.data.rows
    records: list[dict[str, Any]] = []
    for number, each in enumerate(context.members):
        mask_N = each.split.validation_N
        temperature = combiner.single_temperature(context.known, round_outputs.oof_MNC, ~mask_N)
        scores = classification_scores.scores(
            labels, round_outputs.oof_MNC[number, mask_N] / temperature, rows.targets_NC[mask_N]
        )
        records.append(
            {
                "member": each.name,
                "repeat": each.split.repeat,
                "fold": context.data.folds.names[each.split.fold],
                "seed": each.seed,
                "train_rows": len(context.data.training(each.split)),
                "rows": int(mask_N.sum()),
                "scores": scores,
            }
        )
    sizes = {key: float(np.mean([each[key] for each in records])) for key in ("train_rows", "rows")}
    scores_of = [
        {name: value for name, value in each["scores"].items() if not name.endswith(_BOUNDS)} for each in records
    ]
    summary = gains.fold_summary(scores_of, train_rows=sizes["train_rows"], test_rows=sizes["rows"])
    return records, summary


def _duplicates(context: CrossvalContext) -> dict[str, Any] | None:
    report = context.data.duplicates
    if report is None:
        return None
    more = {"conflicts": context.data.conflicts, "leak": context.data.leak, "left_out": context.data.rows.skipped}
    return {**report._asdict(), **more}
