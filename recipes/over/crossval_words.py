"""Pseudo-labels and views of rows with several labels each, such as a tag for each word: folds decide about them.

Every stage is judged on out-of-fold words, those of a row and of its near-duplicates as one witness.

Legend: M members, T those of a fold, R rows, S labels (words) of a row, N words of all held-out rows, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from safetensors import numpy as safetensors

from workbench.config import RunConfig
from workbench.config.sections.pseudo_label_config import PseudoLabelConfig
from workbench.crossval.pseudo_labels import ROUNDING
from workbench.crossval.stages import Predictions, StageLog
from workbench.data.batching import Floats, Indices
from workbench.errors import DataError
from workbench.evaluation.forward_passes import stored_results
from workbench.recipes.over import sweep
from workbench.recipes.over.sweep import SweepMember
from workbench.recipes.over.sweep_tasks import SweepTask, Trials
from workbench.recipes.single import word_run
from workbench.recipes.single.single_run import SingleRun
from workbench.recipes.single.word_run import WordRun
from workbench.runs import files, provenance
from workbench.runs.run_directory import Run
from workbench.training.optim.schedules import total_steps

if TYPE_CHECKING:
    import pandas as pd

Member = WordRun[Any, Any]


class Kept(NamedTuple):
    """What stays after all stages."""

    members: Sequence[Member]
    """The folds' runs that answer."""
    outputs: list[list[Floats]] | None
    """What each says of the words (S, C) of its held-out rows, where views stay; None: what its run directory has."""
    log: StageLog


def wanted(config: RunConfig) -> bool:
    """Whether folds that are runs have any of these stages."""
    return bool(config.tta.views) or config.pseudo_label.unlabelled is not None


def prepare(config: RunConfig, first: SingleRun[Any, Any]) -> Any:
    """The rows without labels, one of each cluster of near-duplicates and none like a labelled row; None: no file.

    Args:
        first: The first fold's run, which has the run directory of all.

    Raises:
        DataError: No row is left, or a view changes no row.
    """
    source = config.pseudo_label.unlabelled
    assert isinstance(first, WordRun), "facts of the task say so"
    first.require_views(config.tta)
    if source is None:
        return None
    rows = first.unlabelled(source)
    provenance.note_data(first.run, {"unlabelled": rows.facts()})
    known = [text for each in first.rows.values() for text in first.texts(each)]
    _, starts = np.unique(word_run.groups(first, [*known, *first.texts(rows)]), return_index=True)
    new = np.sort(starts[starts >= len(known)]) - len(known)
    if not len(new):
        raise DataError(f"{source}: every row is a near-duplicate of one with labels. Give other rows.")
    return rows.subset(new)


def decide(
    config: RunConfig,
    run: Run,
    trials: Trials,
    folds: Sequence[SingleRun[Any, Any]],
    unlabelled: Any,
    pooled: Callable[[Sequence[pd.DataFrame]], dict[str, float]],
) -> Kept:
    """Offer each stage to the out-of-fold words; decision.json says which stay.

    Args:
        folds: The runs of the folds, which are trained.
        unlabelled: See `prepare`.
        pooled: Scores of the tables of predictions of all members.
    """
    options, members = config.pseudo_label, [each for each in folds if isinstance(each, WordRun)]
    start, callback = members, members[0].callback
    counts = [len(labels) for each in members for labels in each.labels(each.rows["held_out"])]

    def scores(values_NC: Floats) -> dict[str, float]:
        p_RSC, tables = np.split(values_NC, np.cumsum(counts)[:-1]), []
        for each in start:
            own, p_RSC = p_RSC[: len(each.rows["held_out"])], p_RSC[len(each.rows["held_out"]) :]
            tables.append(each.table(each.rows["held_out"], own, labelled=True))
        return pooled(tables)

    rounds = options.rounds if unlabelled is not None else 0
    words = word_run.judged(members, scores)
    log = StageLog(run, words, callback, rounds + bool(config.tta.views), config.folds.keep)
    log.begin("supervised", "Adapters of the folds", _predictions(_held_out(members)))
    for number in range(1, rounds + 1):
        name, title = f"pseudo_label {number}", f"Pseudo-labels, round {number}"
        chosen = choices(options, members, unlabelled, [len(each.rows["train"]) for each in start])
        facts = _facts(chosen, len(unlabelled))
        if not any(len(each.rows) for each in chosen):
            log.abstain(name, title, facts, why="No row is sure in every word. Lower pseudo_label.threshold.")
            break
        retrained = _train(config, run, trials, start, chosen, unlabelled, number)
        found = _predictions(_held_out(retrained))
        if not log.offer(name, title, found, facts, least=options.least_gain, sure=options.sure):
            break
        members = retrained
    outputs, facts = None, word_run.view_facts(config.tta)
    if config.tta.views:
        held = [each.rows["held_out"] for each in members]
        views = [[rows, *start[0].in_views(rows, config.tta)] for rows in held]
        merged = [_asked(each, "in_views", own) for each, own in zip(members, views, strict=True)]
        if log.offer("tta", "Test-time views", _predictions(merged), facts, least=config.tta.least_gain):
            outputs = merged
    kept = {"folds": [each.run.path.name for each in members], "tta": facts if outputs is not None else None}
    files.write_json(run.path / "decision.json", kept)
    return Kept(members, outputs, log)


class Chosen(NamedTuple):
    """Rows that a fold's own members are sure of."""

    rows: Indices
    """Numbers of unlabelled rows, ascending."""
    p_RSC: list[Floats]
    """Mean probabilities of their words."""


def choose(config: PseudoLabelConfig, p_TRSC: Sequence[Sequence[Floats]], *, labelled: int) -> Chosen:
    """The rows whose every word is probable enough and agreed upon; the surest, `cap` times the labelled ones at most.

    Args:
        p_TRSC: What each member of one fold says, none of which saw the fold's held-out rows.
    """
    mean_RSC = [np.mean(each, axis=0) for each in zip(*p_TRSC, strict=True)]
    sure_R = np.asarray([p_SC.max(1).min() if len(p_SC) else 0.0 for p_SC in mean_RSC])
    agree_R = np.mean(
        [
            [np.array_equal(p.argmax(1), mean.argmax(1)) for p, mean in zip(own, mean_RSC, strict=True)]
            for own in p_TRSC
        ],
        axis=0,
    )
    passed = np.flatnonzero((sure_R >= config.threshold) & (agree_R >= config.agreement - ROUNDING))
    most = len(passed) if config.cap is None else int(config.cap * labelled + ROUNDING)
    rows = np.sort(passed[np.argsort(-sure_R[passed], kind="stable")][:most])
    return Chosen(rows, [mean_RSC[row] for row in rows.tolist()])


def choices(
    config: PseudoLabelConfig, members: Sequence[Member], unlabelled: Any, labelled: Sequence[int]
) -> list[Chosen]:
    """The pseudo-labels of each member, from the members of its fold alone: all others saw the fold's rows.

    Args:
        labelled: Labelled rows that each trains on.
    """
    said = [_asked(each, "unlabelled", [unlabelled]) for each in members]
    folds = [each.config.data.fold for each in members]
    return [
        choose(config, [own for other, own in zip(folds, said, strict=True) if other == fold], labelled=rows)
        for fold, rows in zip(folds, labelled, strict=True)
    ]


def _train(
    config: RunConfig,
    run: Run,
    trials: Trials,
    members: Sequence[Member],
    chosen: Sequence[Chosen],
    unlabelled: Any,
    number: int,
) -> list[Member]:
    """Train the folds of labelled rows again, each with its pseudo-labelled rows too, for as many steps."""
    again, entries = [], []
    for trial, member, own in zip(trials, members, chosen, strict=True):
        train = member.config.train.model_copy(update={"steps": total_steps(member.config, len(member.rows["train"]))})
        name = f"round-{number}-{member.run.path.name}"
        folder, rows = run.path / "members" / name, unlabelled.subset(own.rows)
        taught = member.taught(rows, own.p_RSC).as_member(
            member.config.model_copy(update={"train": train}), Run(folder, None, resumed=folder.exists())
        )
        table = member.table(rows, own.p_RSC, labelled=False)
        files.write_bytes(taught.run.path / "pseudo_labels.parquet", table.to_parquet())
        again.append(taught)
        entries.append(SweepMember(replace(trial, name=name, config=taught.config), taught.run))
    if not all(each.run.adapter.exists() for each in again):
        callback = members[0].callback
        callback.say(f"Training with pseudo-labels, round {number} ...")
        task = SweepTask(again[0], {each.config.data.fold: each for each in again})
        sweep.train(task, run, entries, callback, sweep.apart(config))
    return again


def _held_out(members: Sequence[Member]) -> list[list[Floats]]:
    return [_asked(each, "held_out", [each.rows["held_out"]]) for each in members]


def _asked(member: Member, name: str, views: Sequence[Any]) -> list[Floats]:
    """Probabilities of the words of rows by a member, read in `views`; kept in a file of its run directory."""
    path = member.run.path / f"{name}.safetensors"
    if not path.exists():
        scoring = stored_results(member.config, member.run, member.callback.stop_requested, model=name)
        p_RSC = member.probabilities(member.load(), views, scoring)
        ends_R = np.cumsum([len(each) for each in p_RSC])
        files.write_bytes(path, safetensors.save({"p_NC": np.concatenate(p_RSC), "ends_R": ends_R}))
        scoring.store.clear()
    kept = safetensors.load(path.read_bytes())
    return np.split(kept["p_NC"], kept["ends_R"][:-1])


def _predictions(p_MRSC: Sequence[Sequence[Floats]]) -> Predictions:
    return Predictions(np.concatenate([p_SC for own in p_MRSC for p_SC in own]), None)


def _facts(chosen: Sequence[Chosen], unlabelled: int) -> dict[str, Any]:
    """Means over members, for the report."""
    rows = float(np.mean([len(each.rows) for each in chosen]))
    sure = [p_SC.max(1).mean() for each in chosen for p_SC in each.p_RSC]
    return {
        "unlabelled": unlabelled,
        "rows": rows,
        "share": rows / unlabelled,
        "confidence": float(np.mean(sure)) if sure else None,
    }
