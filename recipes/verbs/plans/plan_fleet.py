"""Plans of members in one bank, of fleets, sweeps, searches and folds, and how many of a fleet fit into a memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from workbench.config import RunConfig, task_facts
from workbench.config.expansions import fleet_expansion, search_expansion, sweep_expansion
from workbench.config.expansions.member_runs import Trial
from workbench.config.model_heads import ModelHead
from workbench.models import classifier
from workbench.models.backbones import Loader
from workbench.planning import step_time
from workbench.planning.dry_run import dry_run
from workbench.planning.dry_trainings import BankTraining
from workbench.planning.fake_tensors import BlueprintLoader, fake_tensors
from workbench.planning.plan import MOST, MembersThatFit, Plan, that_fit
from workbench.planning.step_time import Timed
from workbench.recipes.over import fleet_training, search_checks
from workbench.recipes.over.fleet_bank import FleetMember, Single, prepared
from workbench.recipes.over.fleet_board import FleetBoard
from workbench.recipes.verbs.plans import plan_parts
from workbench.recipes.verbs.plans.plan_parts import Carried, DryRunParts
from workbench.runs import files
from workbench.runs.run_directory import Run
from workbench.training import bank_trainer
from workbench.training.callbacks import Silent

MakePlan = Callable[[RunConfig], Plan]
"""`plan.plan` with devices and memory given."""
FEW = 2
"""Members of the first dry run but one, at least; it has at most twice as many."""
_ROWS = {"recipe", "seed", "data", "model", "masking", "classes", "image", "audio"}
"""Sections on which the rows of a member depend."""


def training(config: RunConfig) -> tuple[ModelHead, Callable[[RunConfig, Run, Loader], BankTraining]]:
    """The members of a fleet that train at once."""
    trials = at_once(config)
    singles: dict[str, Single] = {}

    def member(trial: Trial[RunConfig], own: RunConfig, run: Run, load: Loader) -> FleetMember:
        key = trial.config.model_dump_json(include=_ROWS)
        directory = run.own(f"members/{trial.name}")
        files.write_json(directory.path / "before.json", {})
        if key not in singles:
            singles[key] = prepared(trial, directory, Silent()).single
        evaluate = trial.config.evaluate.model_copy(
            update={"samples": 0}
        )  # nothing is written by tensors without values
        changes: dict[str, Any] = {"model": own.model, "evaluate": evaluate}
        mine = trial.config.model_copy(update=changes)
        single = replace(singles[key], config=mine, run=directory, callback=Silent(), loader=load)
        return FleetMember(Trial(trial.name, trial.settings, mine, trial.number), single)

    def make(own: RunConfig, run: Run, load: Loader) -> BankTraining:
        members = {trial.name: member(trial, own, run, load) for trial in trials}
        board = FleetBoard(run, trials, len(trials), dict.fromkeys(members, 0))
        return BankTraining(fleet_training.FleetTraining(own, board, members, Silent()).trainer)

    return fleet_training.known_head(config), make


def at_once(config: RunConfig) -> list[Trial[RunConfig]]:
    """The members that a plan lets train at once: the largest, as any may come together, in the order of the fleet.

    By their order the rows of a micro-batch share blocks of attention, and so bytes.
    """
    return sorted(largest_first(config)[: _at_once(config)], key=lambda trial: trial.number)


def largest_first(config: RunConfig) -> list[Trial[RunConfig]]:
    """The members of a fleet by the values that they train, the most first."""
    trials = fleet_training.trials(config)
    sizes = fleet_training.adapters(config, trials)
    return [trials[number] for number in sorted(range(len(trials)), key=lambda number: -sizes[number].trainable)]


def can_grow(config: RunConfig) -> bool:
    """Whether a plan says how many members of a run fit."""
    over = config.over
    return over is not None and config.task.fleets and (not over.ships or (over.spread and over.table is not None))


def remembering(make: MakePlan) -> MakePlan:
    """The same, with one dry run for plans of the same steps; `train.checkpointing=auto` begins by keeping all."""
    known: dict[str, Plan] = {}

    def remembered(config: RunConfig) -> Plan:
        if config.train.checkpointing == "auto":
            kept = config.train.model_copy(update={"checkpointing": False})
            config = config.model_copy(update={"train": kept})
        if (key := config.model_dump_json()) not in known:
            known[key] = make(config)
        return known[key]

    return remembered


def fitting(config: RunConfig, plan: Plan, make: MakePlan, timing: Callable[[Plan], Timed]) -> MembersThatFit:
    """How many members like those of a fleet or sweep fit, and the time of a step with one, half and all of these.

    Args:
        plan: Of the run, whose seconds are known.
    """
    fleet = _is_fleet(config)
    here = _at_once(config) if fleet else len(sweep_expansion.trials(config))
    plans = {here: plan} if fleet else {}

    def of(many: int) -> Plan:
        if many not in plans:
            plans[many] = make(with_members(config, many))
        return plans[many]

    members = that_fit(
        lambda many: _bytes(of(many)), few=min(max(here, FEW), 2 * FEW), memory=plan.memory - plan.process
    )
    seconds = {many: timing(of(many)).seconds for many in {1, here // 2} - {0, here}}
    return replace(members, seconds={**seconds, here: plan.seconds or 0.0})


def decided(config: RunConfig, make: MakePlan) -> RunConfig:
    """A fleet with `at_once` decided: as many as fit, or one where none does."""
    members = len(config.fleet.members)
    if not _is_fleet(config) or config.fleet.at_once != "auto":
        return config

    def with_room(many: int) -> RunConfig:
        return config.model_copy(update={"fleet": config.fleet.model_copy(update={"at_once": many})})

    if members <= MOST and make(with_room(members)).fits:
        return with_room(members)
    if members < 2 * FEW:
        return with_room(1)
    room = make(with_room(1))
    largest = that_fit(
        lambda many: _bytes(make(with_room(min(many, members)))), few=FEW, memory=room.memory - room.process
    )
    return with_room(max(1, min(members, largest.count)))


def _bytes(plan: Plan) -> int:
    return plan.needed - plan.process


def with_members(config: RunConfig, many: int) -> RunConfig:
    """A fleet of so many members that train at once: those of a fleet or sweep, over and over."""
    trials: Sequence[Trial[RunConfig]]
    trials = largest_first(config) if _is_fleet(config) else sweep_expansion.trials(config)
    own = config if _is_fleet(config) else None
    settings = []
    for trial in trials:
        rows = {} if own else {"data.train": config.data.train, "data.sources": config.data.model_dump()["sources"]}
        given = dict(trial.settings) if own is None else own.fleet.members[trial.name]
        settings.append((trial.name, {**{key: value for key, value in rows.items() if value}, **given}))
    members = {}
    for number in range(many):
        name, given = settings[number % len(settings)]
        members[fleet_expansion.plain(f"{name}+{number}")] = given
    fleet = next(name for name, facts in task_facts.OVER.items() if not facts.ships)
    values = {**config.model_dump(mode="json"), "recipe": fleet, "of": config.task.name, "sweep": {}}
    return RunConfig.model_validate({**values, fleet: {"at_once": many, "members": members}})


def _is_fleet(config: RunConfig) -> bool:
    """Whether members, and not the run, ship models."""
    return config.over is not None and not config.over.ships


def _at_once(config: RunConfig) -> int:
    limit = config.fleet.at_once
    return len(config.fleet.members) if limit == "auto" else limit


def members(config: RunConfig, run: Run) -> DryRunParts:
    """Adapters that train together."""
    from workbench.recipes.over import sweep

    shared, trials, over = config, [], config.over
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
        task, make = _members(shared, trials, run)
    else:
        task, make = _folds(config) if config.crossvalidates else training(config)

    def carry_out(own: RunConfig, run: Run, loader: BlueprintLoader, **_: Any) -> Carried:
        with fake_tensors():  # of all blocks: members number them
            fit = make(own, run, loader)
            usage = dry_run(fit, fit.held_out_loss if fit.config.evaluate.every is not None else lambda: None)
            return Carried(loader.loaded[0], fit, usage, step_time.work(fit))

    parts = plan_parts.parts(config, task, run, carry_out, make, loader=BlueprintLoader(), timed=shared)
    every = parts.contents.trainable
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
