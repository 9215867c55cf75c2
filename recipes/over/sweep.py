"""A sweep: K settings and seeds of one recipe, trained in one bank over one backbone; the best is shipped."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from workbench import report
from workbench.adapters import anatomy
from workbench.config import RunConfig
from workbench.config.expansions import sweep_expansion
from workbench.config.expansions.member_runs import Trial
from workbench.data.batching import Examples
from workbench.errors import TrainingError
from workbench.models import backbones, model_sizes
from workbench.recipes.over import member_results, sweep_tasks
from workbench.recipes.over.sweep_tasks import SweepBank, SweepTask
from workbench.recipes.task import MembersAtOnce
from workbench.runs import files, units
from workbench.runs.run_directory import Run
from workbench.training import bank_trainer, capacity, early_stopping
from workbench.training.adapter_trainer import TrainTask
from workbench.training.bank_trainer import BankTrainer
from workbench.training.callbacks import BankProgress, Callback
from workbench.training.distributed import data_parallel, layout_checks
from workbench.training.distributed.placement import Placement
from workbench.training.step_metrics import peak_bytes

Scores = dict[str, Any]
BYTES = 16
"""Bytes of memory for each trained parameter: value, gradient and the optimizer's two moments, in float32."""


class SweepMember(NamedTuple):
    """A member, and the run directory of its own."""

    trial: Trial[RunConfig]
    run: Run


def main(config: RunConfig, run: Run, callback: Callback, at_once: MembersAtOnce) -> Scores:
    """Train and score every member; returns scores before and after of the best, as they stand in scores.json.

    `seed` varies initial values and the order of rows. What is held out is the same for all members, and depends on
    the sweep's own seed.
    """
    trials, shared = sweep_expansion.trials(config), sweep_expansion.shared(config)
    task = sweep_tasks.prepare(shared, run, trials, callback)
    placement, entries = Placement(config.distributed, run.ranks), member_runs(config, run, trials)
    if not (run.resumed and (run.home / "sweep.json").exists()):
        write_table(config, run, trials)
    try:
        train_all(config, task, run, entries, callback)
    finally:
        table = write_table(config, run, trials)
    if not run.ranks.first:
        return {}

    # Ship the best, which is scored as it was saved.
    if table["best"] is None:
        raise TrainingError(
            "No member has a finite held-out loss. Lower train.learning_rate, or look at the held-out rows."
        )
    world, together = placement.dealt.world, apart(config) is None
    spent = [[row["seconds"] or 0.0 for row in table["members"][rank::world]] for rank in range(world)]
    run.note(elapsed_s=max(max(seconds) if together else sum(seconds) for seconds in spent))
    callback.say(f"Shipping {table['best']}, which has the lowest held-out loss of {len(trials)} members.")
    ship(run, Run(run.path / "members" / table["best"], None, resumed=True))
    scores = files.read_json(run.path / "scores.json")
    run.note(status="done")
    report.write(run.path)
    return scores


def member_runs(config: RunConfig, run: Run, trials: Sequence[Trial[RunConfig]]) -> list[SweepMember]:
    """The members of a sweep or a cross-validation that this process trains, each in a directory of its own."""
    placement = Placement(config.distributed, run.ranks)
    layout_checks.require_members(len(trials), placement.dealt)
    if not run.resumed:
        shutil.rmtree(run.path / "members", ignore_errors=True)
    run.ranks.wait()  # until nothing of an earlier one is left
    mine = placement.dealt.share(trials)
    entries = [SweepMember(trial, placement.own(run, f"members/{trial.name}")) for trial in mine]
    for trial, own in entries:
        member_results.opened(own, trial).note(ended=False)
    run.ranks.wait()  # until nobody seems to be done who is not
    return entries


def train_all(config: RunConfig, task: SweepTask, run: Run, entries: Sequence[SweepMember], callback: Callback) -> None:
    """Train and score the members of this process, and wait for those of the others.

    Raises:
        TrainingError: Every member of a run of one process failed; this is the first one's.
    """
    train(task, run, entries, callback, apart(config))
    for entry in entries:
        score(task, run, entry)
    trials = sweep_expansion.trials(config)
    data_parallel.wait_for_ranks(
        lambda: all(member_run(run, trial).manifest.get("ended") for trial in trials), callback
    )


def apart(config: RunConfig) -> str | None:
    """Why the members train one after another; None where one bank holds them."""
    folded = config.over is not None and config.over.folds
    if not (config.folds.together if folded else config.sweep.together):
        return f"{'folds' if folded else 'sweep'}.together=false asks for it"
    if not config.task.banked:
        return f"no bank trains adapters of {config.task.name} together"
    members = [trial.config for trial in sweep_expansion.trials(config)]
    return next((why for member in members if (why := bank_trainer.refusal(member)) is not None), None)


def train(task: SweepTask, run: Run, entries: Sequence[SweepMember], callback: Callback, reason: str | None) -> None:
    """The members of this process.

    Args:
        reason: Why they train one after another.

    Raises:
        TrainingError: every member of a run of one process failed; this is the first one's.
    """
    try:
        if reason is None:
            together(task, run, entries, callback)
        else:
            callback.say(f"{len(entries)} members, one after another: {reason}.")
            one_after_another(task, run, entries, callback)
    except TrainingError:
        if all(own.ranks == run.ranks for _, own in entries):  # else others may have members that came to their end
            raise


class SweepTraining(NamedTuple):
    """All members in one bank."""

    trainer: BankTrainer
    loaded: SweepBank
    progress: BankProgress


def training(task: SweepTask, entries: Sequence[SweepMember], callback: Callback) -> SweepTraining:
    """All members in one bank, training not begun."""
    loaded = task.load_bank([entry.trial for entry in entries])
    members = loaded.bank.members
    for member, entry in zip(members, entries, strict=True):
        entry.run.note(model=model_sizes.member_facts(entry.trial.config, loaded.backbone, loaded.bank, member))
    callback.say(_memory([entry.run.manifest["model"]["trainable"] for entry in entries]))
    tokens = max(
        capacity.tokens_per_device(
            entry.trial.config,
            train,
            backbones.device(),
            width=anatomy.hidden_size(loaded.backbone.model.config),
            members=len(entries),
            compute=loaded.backbone.compute,
        )
        for entry, train in zip(entries, loaded.train, strict=True)
    )
    names = {member: entry.trial.name for member, entry in zip(members, entries, strict=True)}
    progress = BankProgress(callback, names)
    trainer = BankTrainer(
        loaded.bank,
        [
            _train_task(loaded, member, entry, train)
            for member, entry, train in zip(members, entries, loaded.train, strict=True)
        ],
        freezer=loaded.freezer,
        objectives=loaded.objectives,
        predict=loaded.predict,
        compute=loaded.backbone.compute,
        tokens=tokens,
        callback=progress,
        reads_packed=loaded.reads_packed,
    )
    return SweepTraining(trainer, loaded, progress)


def together(task: SweepTask, run: Run, entries: Sequence[SweepMember], callback: Callback) -> None:
    """Train all members in one bank; each that came to its end is saved in its own directory."""
    trainer, loaded, progress = training(task, entries, callback)
    members = loaded.bank.members
    try:
        with task.shared.kept_outputs(loaded.backbone, list(task.folds.values())):
            trainer.work()
    finally:
        progress.flush()
        for member, entry in zip(members, entries, strict=True):
            if (error := trainer.members[member].error) is not None:
                entry.run.note(status="failed", reason=str(error))
    run.note(peak_bytes=peak_bytes(trainer.device))
    for member, entry in zip(members, entries, strict=True):
        if trainer.members[member].error is not None:
            continue
        entry.run.note(batch=trainer.batch_facts(trainer.members[member]))
        with trainer.final_values(member):
            if entry.run.ranks.first:
                loaded.save(entry.run.adapter, partial(loaded.bank.save, member))


def one_after_another(task: SweepTask, run: Run, entries: Sequence[SweepMember], callback: Callback) -> None:
    """Each member as a run of its own; one that has its adapter already is done. Raises as `train` does."""
    errors = []
    for trial, own in entries:
        if (own.home / "adapter").exists():
            continue
        callback.say(f"Member {trial.name}:")
        shared = trial.config.data.fold.of is None
        if shared:
            member_results.copy_missing(run, own, "before.json")  # the backbone before training is the same for all
        try:
            task.single(trial.config, own).train()
        except TrainingError as error:
            errors.append(error)
            own.note(status="failed", reason=str(error))
            callback.say(f"{trial.name} ends here; the others go on. {error}")
        if shared:
            member_results.copy_missing(own, run, "before.json")
    if len(errors) == len(entries):
        raise errors[0]
    run.note(peak_bytes=max(own.manifest.get("peak_bytes", 0) for _, own in entries))


def score(task: SweepTask, run: Run, entry: SweepMember) -> None:
    """Score what a member saved, as its run alone would; one whose held-out loss is not finite has no scores."""
    trial, own = entry
    if own.ranks.agreed(shipped_loss(member_results.row(trial, own), trial.config) is not None):
        if not task.folds:
            member_results.copy_missing(run, own, "before.json")
        member_results.finish(task.single(trial.config, own))
    own.note(ended=True)


def shipped_loss(row: Mapping[str, Any], config: RunConfig) -> float | None:
    """Held-out loss of what a member would ship, or what `early_stopping.criterion` has in its place; None where it is
    not done, or the loss is not finite."""
    loss: float | None = row["best" if config.save.ship == "best" else "last"]
    return loss if row["status"] == "done" else None


def write_table(config: RunConfig, run: Run, trials: Sequence[Trial[RunConfig]]) -> dict[str, Any]:
    """sweep.json: what came of each member so far, its scores, and which is the best of those that are done."""
    rows = [member_results.row(trial, member_run(run, trial)) for trial in trials]
    for row in rows:
        scores = files.read_json(run.home / "members" / row["member"] / "scores.json")
        row["scores"] = {split: scores[split] for split in ("after", "test") if split in scores}
    losses = {row["member"]: loss for row in rows if (loss := shipped_loss(row, config)) is not None}
    best = min(losses, key=lambda member: losses[member]) if losses else None
    table = {"best": best, "ship": config.save.ship, "members": rows, "over_seeds": member_results.over_seeds(rows)}
    files.write_json(run.path / "sweep.json", table)
    return table


def ship(run: Run, best: Run, *, but: Collection[str] = ()) -> None:
    """Give the run the adapter of its best member, and all that is known about its training, `but` some files."""
    with files.new_folder(run.adapter) as aside:
        shutil.copytree(best.adapter, aside, dirs_exist_ok=True)
    for path in best.path.iterdir():
        if path.is_file() and path.name not in ("config.yaml", "manifest.json", *but):
            files.write_bytes(run.path / path.name, path.read_bytes())
    run.note(model=best.manifest["model"], batch=best.manifest["batch"])


def _train_task(loaded: SweepBank, member: str, entry: SweepMember, train: Examples) -> TrainTask:
    parts, judge = dict[str, float](), loaded.own_losses.get(member, partial(loaded.held_out_loss, None))

    def held_out_loss() -> float:
        with loaded.bank.only(member):
            loss, metrics = judge()
        parts.update((name, value) for name, value in metrics.items() if name == early_stopping.METRIC)
        return loss

    return TrainTask(train, held_out_loss, entry.trial.config, entry.run, held_out_parts=parts)


def _memory(trained: Sequence[int]) -> str:
    low, high = (units.size(BYTES * count) for count in (min(trained), max(trained)))
    each = low if low == high else f"{low} to {high}"
    return (
        f"{len(trained)} members in one bank: {units.count(max(trained))} trained parameters each at most; with "
        f"gradients and optimizer {each} of memory a member, {units.size(BYTES * sum(trained))} for all."
    )


def member_run(run: Run, trial: Trial[RunConfig]) -> Run:
    """A member as it stands in the run's directory, whoever trains it."""
    return Run(run.home / "members" / trial.name, None, resumed=True)
