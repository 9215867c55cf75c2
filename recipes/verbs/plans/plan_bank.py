"""Dry runs of adapters that train together: folds, and members of a sweep, a search or a fleet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from workbench.config import RunConfig
from workbench.config.expansions import search_expansion, sweep_expansion
from workbench.config.expansions.member_runs import Trial
from workbench.config.model_heads import ModelHead
from workbench.models import classifier
from workbench.models.backbones import Loader
from workbench.planning import step_time
from workbench.planning.dry_run import dry_run
from workbench.planning.dry_trainings import BankTraining
from workbench.planning.fake_tensors import BlueprintLoader, fake_tensors
from workbench.recipes.over import search_checks
from workbench.recipes.verbs.plans import plan_fleet, plan_parts
from workbench.recipes.verbs.plans.plan_parts import DryRunParts
from workbench.runs.run_directory import Run
from workbench.training import bank_trainer
from workbench.training.callbacks import Silent


def members(config: RunConfig, run: Run) -> DryRunParts:
    """Adapters that train together."""
    from workbench.recipes.over import sweep

    loader, shared, trials, over = BlueprintLoader(), config, [], config.over
    assert over is not None, "one adapter is no bank"
    reason = None
    if config.crossvalidates:
        reason = "folds.together=false asks for it" if not config.folds.together else bank_trainer.refusal(config)
    elif over.own_clock:
        shared, trials = search_expansion.shared(config), search_checks.first_wave(config)
        reason = search_checks.apart(config, trials[0])
    elif config.has_members and over.ships:
        shared, trials, reason = sweep_expansion.shared(config), sweep_expansion.trials(config), sweep.apart(config)
    if reason:
        raise plan_parts.one_after_another(config, reason)
    if trials:
        task, training = _members(shared, trials, run)
    else:
        task, training = _folds(config) if config.crossvalidates else plan_fleet.training(config)
    with fake_tensors():
        fit = training(shared, run, loader)
        usage = dry_run(fit, fit.held_out_loss if fit.config.evaluate.every is not None else lambda: None)
        work = step_time.work(fit)
    parts = plan_parts.parts(config, task, loader.loaded[0], fit, usage, work, training, timed=shared)
    every = sum(each.numel() for each in fit.masters)
    return parts._replace(size=parts.size._replace(trainable=every), contents=replace(parts.contents, apart=True))


def _folds(config: RunConfig) -> tuple[ModelHead, Callable[[RunConfig, Run, Loader], BankTraining]]:
    """The first round of a cross-validation."""
    from workbench.crossval import fold_adapters
    from workbench.recipes.over import crossval_labelled

    reader, data, *_ = crossval_labelled.prepare(config)
    members = fold_adapters.fold_adapters(data.folds, seeds=config.folds.seeds)
    lessons = [fold_adapters.fold_task(each, data, None, seed=config.seed) for each in members]
    rows = [each for each in (data.rows, data.test, data.unlabelled) if each is not None]

    def training(own: RunConfig, run: Run, load: Loader) -> BankTraining:
        context = fold_adapters.FoldContext(own, data.labels, reader, rows=rows, loader=load)
        return BankTraining(fold_adapters.fold_bank(context, run, lessons, Silent()).trainer)

    return classifier.task(data.labels, seed=config.seed), training


def _members(
    shared: RunConfig, trials: Sequence[Trial[RunConfig]], run: Run
) -> tuple[ModelHead, Callable[[RunConfig, Run, Loader], BankTraining]]:
    """All members of a sweep, or those that a search begins with."""
    from workbench.recipes.over import sweep, sweep_tasks

    subject = sweep_tasks.prepare(shared, run, trials, Silent())

    def training(own: RunConfig, run: Run, load: Loader) -> BankTraining:
        mine = replace(subject, shared=replace(subject.shared, config=own, run=run, loader=load))
        entries = [sweep.SweepMember(trial, run.own(f"members/{trial.name}")) for trial in trials]
        return BankTraining(sweep.training(mine, entries, Silent()).trainer)

    return subject.shared.task, training
