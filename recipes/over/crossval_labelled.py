"""Cross-validation of rows with a label each: folds in a bank, out-of-fold truth, and stages that it decides about.

Every choice is made on out-of-fold rows; the test rows are looked at once, when nothing can change any more.

Legend: M adapters, N labelled rows, T test rows, V views, C outputs (classes, or 1 for a number).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from workbench import report
from workbench.config import RunConfig
from workbench.config.expansions import sweep_expansion
from workbench.crossval import ensembles, fold_adapters, neighbour_correction, suspects, tta
from workbench.crossval.fold_adapters import FoldContext
from workbench.crossval.stages import StageLog
from workbench.data import leaks, tta_views
from workbench.data.labelled import fold_data
from workbench.data.labelled.fold_data import FoldData
from workbench.data.labelled.records import RowReader
from workbench.data.labelled.text_reader import training_rows
from workbench.data.text import decontamination
from workbench.data.tta_views import RowView, user_merge
from workbench.evaluation import classification_scores, frozen_features, run_embedder
from workbench.evaluation.forward_passes import ResultStore
from workbench.evaluation.frozen_features import FrozenProbe
from workbench.models import backbones, classifier
from workbench.recipes.over import crossval_stages, member_results
from workbench.recipes.over.crossval_stages import CrossvalContext
from workbench.runs import provenance, run_directory
from workbench.runs.ranks import ALONE
from workbench.runs.run_directory import Run
from workbench.runs.trust import Trust
from workbench.training import preflight
from workbench.training.callbacks import Callback
from workbench.training.distributed import layout_checks
from workbench.training.distributed.placement import Placement
from workbench.training.optim.schedules import total_steps
from workbench.training.step_metrics import peak_bytes

Scores = dict[str, Any]


def main(config: RunConfig, run: Run, callback: Callback) -> Scores:
    """Train, choose and score as `config` says; returns what stands in scores.json."""
    if config.folds.nested is not None:
        from workbench.recipes.over import crossval_nested  # with pandas, as below

        require_outer(config)
        return crossval_nested.main(config, run, callback, main)
    if config.sweep.over:
        return _blended(config, run, callback)
    # Data first: it is the cheapest thing to get wrong, and needs no weights.
    reader, data, views, _, notes = prepare(config)
    judged = {} if data.test is None else {"test": data.test}
    for note in [*([data.rows.cleaning.sentence] if data.rows.cleaning else ()), *leaks.told(judged), *notes]:
        callback.say(note)
    sets = {"train": data.rows, "test": data.test, "unlabelled": data.unlabelled}
    provenance.note_data(run, {name: None if rows is None else rows.facts() for name, rows in sets.items()})
    decontamination.write_matches(data.rows.contamination, run)
    leaks.write(run, judged)
    members = fold_adapters.fold_adapters(data.folds, seeds=config.folds.seeds)
    known = ensembles.out_of_fold(
        data.labels, data.rows.targets_NC, [each.split for each in members], cluster_N=data.cluster_N, seed=config.seed
    )
    placement = Placement(config.distributed, run.ranks)
    layout_checks.require_members(len(members), placement.dealt)
    rows = [rows for rows in sets.values() if rows is not None]
    together = run.ranks if placement.cuts_weights else ALONE
    scored = ResultStore(run.path if run.ranks.first else None, callback.stop_requested, ranks=together)
    fold_context = FoldContext(config, data.labels, reader, rows=rows, placement=placement, scored=scored)
    gates = CrossvalContext.gates(config, data, known, views)
    alone = run_directory.whole(run.home) == run.home and data.outer is None  # a member is not resumed
    log = StageLog(run, data, callback, gates, config.folds.keep, resumes=alone)
    context = CrossvalContext(fold_context, run, data, members, known, log, callback)

    # What the backbone knows already, in a small share of the time; nothing of it enters the training, which it follows
    # unless a clock has to know first how long it takes.
    look = partial(probe, config, run, callback, reader, data)
    probed = look() if run.deadline.limited else None

    # Each fold is judged by adapters that trained on the others; so is every stage that follows.
    round_outputs = fold_adapters.train_round(
        fold_context, run, data, members, [None] * len(members), callback, number=0
    )
    combiner = context.calibrate(round_outputs)
    context, round_outputs = context.drop_suspects(round_outputs, combiner)
    round_outputs = context.pseudo_label(round_outputs, combiner)
    combiner = context.merge(round_outputs, combiner)
    decision = context.augment(round_outputs, combiner, views)
    corrected = context.correct()
    context.consensus()
    rule = context.decide()

    # Nothing changes from here on.
    refit = context.refit(round_outputs, combiner) if config.refits else None
    if not run.ranks.first:
        return {}
    from workbench.recipes.over import crossval_files  # with pandas, 0.2 s that the first step need not wait for

    probed = probed if run.deadline.limited else look()
    scores = crossval_files.write(context, round_outputs, combiner, decision, corrected, rule, refit, probed)
    if data.outer is not None:
        from workbench.recipes.over import crossval_nested

        scores |= crossval_nested.score_outer(config, run, data.outer)
    run.note(elapsed_s=sum(run.manifest["seconds"].values()), peak_bytes=peak_bytes(backbones.device()))
    run.note(status="done")
    scored.clear()
    report.write(run.path)
    return scores


def _blended(config: RunConfig, run: Run, callback: Callback) -> Scores:
    """One cross-validation after another over the same folds, as `sweep.over` says, and the blend of all."""
    trials = sweep_expansion.banks(config)
    for trial in trials:  # before the first one trains
        classifier.require_known_form(trial.config)
        classifier.reader_of_backbone(trial.config)
    for trial in trials:
        own = run.child(f"members/{trial.name}")
        if not (own.home / "decision.json").exists():
            callback.say(f"Cross-validation {trial.number + 1} of {len(trials)}: {trial.name}")
            main(trial.config, member_results.opened(own, trial), callback)
        run.ranks.wait()
    if not run.ranks.first:
        return {}
    from workbench.recipes.over import blend  # with pandas, as below

    parts = blend.read_parts([run.path / "members" / trial.name for trial in trials], trust=Trust(given=True))
    blended = blend.write(run, config, parts, way="auto", callback=callback)
    if config.data.fold.of is not None:
        from workbench.recipes.over import crossval_nested

        outer = prepare(trials[0].config)[1].outer
        assert outer is not None, "data.fold names it"
        crossval_nested.score_outer(config, run, outer)
        report.write(run.path)
    return blended.scores


def require_outer(config: RunConfig) -> None:
    """Read the rows of each outer fold's flow, before the first one trains; raises DataError where one cannot be."""
    for trial in sweep_expansion.outer(config):
        prepare(sweep_expansion.banks(trial.config)[0].config if config.sweep.over else trial.config)


def probe(config: RunConfig, run: Run, callback: Callback, reader: RowReader, data: FoldData) -> FrozenProbe | None:
    """Rows as the frozen backbone sees them, where that costs a small share of the adapters' training."""
    splits = [each.split for each in fold_adapters.fold_adapters(data.folds, seeds=config.folds.seeds)]
    steps = [total_steps(config, int(split.train_N.sum())) for split in splits]
    visits = None if None in steps else sum(each or 0 for each in steps) * config.batch.size
    look = partial(frozen_features.of_folds, config, reader, data.rows, data.folds.fold_RN[0])
    task = classifier.task(data.labels, seed=config.seed)
    return frozen_features.before_run(config, run, task, look, visits=visits, say=callback.say)


def prepare(config: RunConfig) -> tuple[RowReader, FoldData, list[RowView], list[str], list[str]]:
    """Reader, data, views, names of the modules that get an adapter, and sentences on stages and what is left out.

    Refuses what would fail or mislead.
    """
    classifier.require_known_form(config)
    reader, embedders = classifier.reader_of_backbone(config), run_embedder.in_words(config)
    data = fold_data.load(config, reader, run_embedder.of_sources(config, reader))
    watched = data.folds.fold_RN if config.evaluate.every is not None else ()
    folds = {
        f"fold-{name}": data.rows.subset(fold_N == n) for fold_N in watched for n, name in enumerate(data.folds.names)
    }
    classification_scores.require_metric(data.labels, training=data.rows, test=data.test, **folds)
    unlabelled = data.unlabelled and training_rows(data.unlabelled, config, reader)
    together = classifier.augmented_together(data.rows, config, reader)
    data = data._replace(rows=training_rows(together, config, reader), unlabelled=unlabelled)
    _, notes = neighbour_correction.fitting(config.correction, data.folds, data.cluster_N)
    if config.data.drop_suspects:
        suspects.require_classes(data.folds, data.labels, data.rows.targets_NC)
    sets = [rows for rows in (data.rows, data.test, data.unlabelled) if rows is not None]
    modules = preflight.require_backbone(config, sets, classifier.task(data.labels, seed=config.seed))
    views = tta_views.row_views(config, data.labels, data.rows)
    views, left_out = tta_views.useful_views(views, data.rows, reader)
    if (merge := user_merge(config.tta)) is not None:
        tta.try_merge(data.labels, 1 + len(views), merge)
    stages = crossval_stages.in_words(config, data, views=bool(views))
    return reader, data, views, modules, [*stages, *embedders, *notes, *left_out]
