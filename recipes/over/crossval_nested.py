"""Nested cross-validation: what the whole flow of a cross-validation is worth, by rows that nothing in it saw.

Each outer fold is left out in turn. On the other rows everything runs as in the cross-validation itself: its inner
folds, every stage that they decide about, and where `sweep.over` is named, the choice among settings and their blend.

Legend: N labelled rows, C outputs (classes, or 1 for a number).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from workbench import report
from workbench.config import RunConfig
from workbench.config.expansions import sweep_expansion
from workbench.crossval import prediction
from workbench.data.labelled import labelled_data
from workbench.data.labelled.records import RecordSource
from workbench.evaluation import chosen_metric, classification_scores
from workbench.models import classifier
from workbench.recipes.over import blend, member_results
from workbench.runs import files
from workbench.runs.run_directory import Run
from workbench.training.callbacks import Callback

Scores = dict[str, Any]
Flow = Callable[[RunConfig, Run, Callback], Scores]
OUTER = "outer.parquet"
"""File of a run on all outer folds but one: what it says of the rows of that one, by all that it decided."""
NESTED = "nested.parquet"
"""The same of all outer folds together."""


def score_outer(config: RunConfig, run: Run, outer: RecordSource) -> Scores:
    """Write what the finished cross-validation at `run` says of rows that nothing in it saw; returns all its scores."""
    context = prediction.fold_context(run.path, config)
    rows = labelled_data.encode(outer, context.reader, context.labels)
    values_NC = prediction.decided(run.path, context, rows)
    table = classification_scores.predictions_table(context.labels, rows, values_NC, context.reader, labelled=True)
    own = {"nested": classification_scores.value_scores_of(context.labels, values_NC, rows)}
    scores: Scores = files.read_json(run.path / "scores.json") | own
    files.write_json(run.path / "scores.json", scores)
    files.write_bytes(run.path / OUTER, table.assign(fold=str(config.data.fold.number)).to_parquet())
    return scores


def main(config: RunConfig, run: Run, callback: Callback, flow: Flow) -> Scores:
    """The outer folds, and then the cross-validation itself, which the run ships; `flow` runs one of them.

    A killed run goes on where it stopped: finished outer folds stay, and a resumed run with another choice of stages
    decides again in each of them, without training.
    """
    plain = config.model_copy(update={"folds": config.folds.model_copy(update={"nested": None})})
    callback.say(config.folds.nested_cost(steps=config.train.steps is not None))
    members = []
    for trial in sweep_expansion.outer(config):
        own, wanted = run.child(f"nested/{trial.name}"), _digest(trial.config)
        if not (own.home / OUTER).exists() or own.manifest.get("decided") != wanted:
            callback.say(f"Outer fold {trial.number + 1} of {config.folds.nested}:")
            flow(trial.config, member_results.opened(own, trial), callback)
            own.note(decided=wanted)
        run.ranks.wait()
        members.append(own)
    callback.say("The cross-validation of all rows:")
    scores = flow(plain, run, callback)
    if run.ranks.first:
        scores["nested"] = _score(config, run, members)
        files.write_json(run.path / "scores.json", scores)
        report.write(run.path)
    return scores


def _digest(config: RunConfig) -> str:
    return hashlib.sha256(config.model_dump_json().encode()).hexdigest()


def _score(config: RunConfig, run: Run, members: list[Run]) -> dict[str, float]:
    """Scores of all outer folds together, each by its own decision rule; stages.json has those of each."""
    told = [pd.read_parquet(own.path / OUTER) for own in members]
    table = pd.concat(told, ignore_index=True)
    labels = replace(classifier.read_labels(run.path), metric=config.evaluate.judge, shift=())
    targets_NC = labels.targets([blend.label_of(each) for each in table["label"]])
    values_NC = blend.values_of(labels, table)
    scores = classification_scores.value_scores(labels, values_NC, targets_NC)
    scores |= chosen_metric.bounds(labels, values_NC, labels.true(targets_NC))
    rules = [classifier.read_labels(own.path).shift for own in members]
    if any(rules):
        moved = [labels.moved(blend.values_of(labels, own), rule) for own, rule in zip(told, rules, strict=True)]
        found = classification_scores.value_scores(labels, np.concatenate(moved), targets_NC)
        found |= chosen_metric.bounds(labels, np.concatenate(moved), labels.true(targets_NC))
        scores |= classification_scores.of_labels(labels, found)
    files.write_bytes(run.path / NESTED, table.to_parquet())
    folds = blend.fold_scores(labels, values_NC, targets_NC, table["fold"].to_numpy())
    stages = files.read_json(run.path / "stages.json")
    nested = {"folds": folds, "summary": blend.fold_spread(folds)}
    files.write_json(run.path / "stages.json", stages | {"nested": nested})
    return scores
