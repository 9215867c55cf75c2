"""Test-time views of a run of one adapter: its held-out rows decide whether they are used.

Legend: V views with the plain row first, N held-out rows, n those of which views are read, T rows, C outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from workbench.config import RunConfig
from workbench.crossval import tta
from workbench.crossval.ensembles import PARTS
from workbench.crossval.gains import Gain
from workbench.crossval.tta import TtaDecision
from workbench.data import tta_views
from workbench.data.folds.duplicates import Ints
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.data.labelled.labels import Floats, Labels
from workbench.data.labelled.records import RecordSource, RowReader
from workbench.data.tta_views import RowView
from workbench.errors import DataError
from workbench.evaluation import classification_scores
from workbench.evaluation.forward_passes import ModelResults
from workbench.models.classifier import Classifier
from workbench.runs import files, run_directory
from workbench.runs.resume_command import resume_command
from workbench.runs.run_directory import Run
from workbench.training.callbacks import Callback


def passes(run: Path, config: RunConfig) -> int:
    """Forward passes that the run of one adapter at `run` takes for a row, rounded up."""
    return math.ceil(_decision(run).passes) if run_directory.reads_views(run, config) else 1


def prepared(
    config: RunConfig, labels: Labels, rows: LabelledSet, reader: RowReader
) -> tuple[list[RowView], list[str]]:
    """The views that change held-out rows, and a sentence about each that does not.

    Raises:
        ConfigError: A view does not fit the rows, or the user's file is wrong.
        DataError: No view changes any row, or the rows are too few to judge by.
    """
    views = tta_views.row_views(config, labels, rows)
    require_witnesses(rows.source, clusters(rows, reader))
    kept, left_out = tta_views.useful_views(views, rows, reader)
    if (merge := tta_views.user_merge(config.tta)) is not None:
        tta.try_merge(labels, 1 + len(kept), merge)
    return kept, left_out


def in_words(config: RunConfig, names: Sequence[str]) -> str:
    """Sentence on the views that a run will try."""
    when = "as tta.keep says" if config.tta.keep else "if they gain on held-out rows"
    return f"Test-time views, used {when}: {', '.join(names)}."


def require_witnesses(source: str, cluster_N: Ints) -> None:
    """Raise DataError where held-out rows are all near-duplicates."""
    if len(np.unique(cluster_N)) < 2:
        raise DataError(
            f"{source}: held-out rows that are one, or all alike, cannot say whether tta.views help. Give others as "
            "data.held_out, or leave tta out."
        )


def require_change(source: str, view: str, pairs: Iterable[tuple[Ints, Ints]]) -> None:
    """Raise DataError where the tokens of every row are the same in a view."""
    if all(np.array_equal(one, other) for one, other in pairs):
        raise DataError(
            f"{source}: view {view} changes no row as the model reads it: its tokenizer may ignore case. "
            f"Leave {view} out of tta.views."
        )


def clusters(rows: LabelledSet, reader: RowReader) -> Ints:
    """Number of the cluster of near-duplicates of each row (N,), from 0."""
    found = reader.duplicates([RecordSource(rows.source, rows.fingerprint, rows.records, inputs=rows.inputs)])
    return np.unique(found.cluster_N, return_inverse=True)[1]


def decide(
    config: RunConfig,
    run: Run,
    callback: Callback,
    model: Classifier,
    rows: LabelledSet,
    scoring: ModelResults | None = None,
) -> dict[str, Any] | None:
    """Facts about how views are merged, where the held-out rows gain by it or the configuration keeps them."""
    labels = replace(model.labels, metric=config.evaluate.judge)
    views, _ = prepared(config, labels, rows, model.reader)
    plain_NC = labels.values(_outputs(model, rows, scoring))
    values_VNC = np.stack(
        [
            plain_NC,
            *(view.outputs(labels.values(_outputs(model, view.rows(rows, model.reader), scoring))) for view in views),
        ]
    )
    cluster_N = clusters(rows, model.reader)
    part_of = np.random.default_rng([config.seed, 4]).permutation(cluster_N.max() + 1) % PARTS
    decision, _ = tta.fit(
        config.tta,
        labels,
        values_VNC,
        rows.targets_NC,
        part_of[cluster_N],
        names=[view.name for view in views],
        groups_N=cluster_N,
        user_merge=tta_views.user_merge(config.tta),
    )
    decision = replace(decision, gain=settled(config, decision.gain))
    tell(config, run, callback, decision.gain, decision.reason)
    return decision.facts if decision.accepted else None


def settled(config: RunConfig, gain: Gain) -> Gain:
    """The gain of views, accepted against its reason where the configuration keeps them."""
    return replace(gain, accepted=True, kept=True) if config.tta.keep and gain.reason else gain


def tell(config: RunConfig, run: Run, callback: Callback, gain: Gain, why: str) -> None:
    """Say and note what held-out rows decided about views, and how to decide otherwise."""
    word = resume_command(run.home, f"tta.keep={str(not gain.accepted).lower()}")
    otherwise = "" if config.tta.keep else f" To decide otherwise, without training again: `{word}`."
    callback.say(f"Test-time views, by the held-out rows: {why}{otherwise}")
    run.note(views=why)


def outputs(
    run: Path, config: RunConfig, model: Classifier, rows: LabelledSet, scoring: ModelResults | None = None
) -> Floats:
    """Outputs (T, C) of rows by the model of the run at `run`, in views where it decided so."""
    plain_TC = _outputs(model, rows, scoring)
    if not run_directory.reads_views(run, config):
        return plain_TC
    labels = model.labels

    def read(shown: Sequence[LabelledSet]) -> list[Floats]:
        return [labels.values(_outputs(model, each, scoring)) for each in shown]

    values_TC = merged(config, model.reader, labels, _decision(run), rows, labels.values(plain_TC), read)
    return classification_scores.outputs_of_values(labels, values_TC)


def merged(
    config: RunConfig,
    reader: RowReader,
    labels: Labels,
    decision: TtaDecision,
    rows: LabelledSet,
    plain_TC: Floats,
    read: Callable[[Sequence[LabelledSet]], Iterable[Floats]],
) -> Floats:
    """Values (T, C) of rows: merged over views where these are needed, of the plain row elsewhere.

    Args:
        plain_TC: Values of the plain rows.
        read: From some of the rows, in each view, to their values.
    """
    needed_T = tta.needs_views(decision, plain_TC)
    if not needed_T.any():
        return plain_TC
    views = [view for view in tta_views.row_views(config, labels, rows) if view.name in decision.names]
    some, values_VTC = rows.subset(needed_T), np.stack([plain_TC] * len(decision.names))
    read_V = read([view.rows(some, reader) for view in views])
    for place, (view, values_nC) in enumerate(zip(views, read_V, strict=True), start=1):
        values_VTC[place, needed_T] = view.outputs(values_nC)
    return tta.apply(decision, labels, values_VTC, tta_views.user_merge(config.tta))


def _decision(run: Path) -> TtaDecision:
    return TtaDecision.from_facts(files.read_json(run / "decision.json")["tta"])


def _outputs(model: Classifier, rows: LabelledSet, scoring: ModelResults | None) -> Floats:
    return classification_scores.predict_outputs(model.model, model.outputs, rows, scoring=scoring)
