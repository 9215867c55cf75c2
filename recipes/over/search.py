"""A search: settings from a space, of which successive halving finds the best in one bank; the best is shipped."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from workbench.config import RunConfig
from workbench.config.expansions import search_expansion
from workbench.data.batching import Indices
from workbench.errors import ConfigError, Stopped, TrainingError
from workbench.recipes.over import member_results, search_board, search_checks, sweep, sweep_tasks
from workbench.recipes.over.search_board import Board, WaveRecord
from workbench.recipes.over.sweep import SweepMember
from workbench.recipes.over.sweep_tasks import HeldOut, SweepTask
from workbench.recipes.single.single_run import Scores
from workbench.recipes.task import MembersAtOnce
from workbench.runs.run_directory import Run
from workbench.training import early_stopping
from workbench.training.callbacks import Callback
from workbench.training.step_metrics import peak_bytes


def main(config: RunConfig, run: Run, callback: Callback, at_once: MembersAtOnce) -> Scores:
    """Train in waves until halving is over; returns scores before and after of the best, as they stand in scores.json.

    A wave trains the members that go on, each from its own checkpoint, and new ones. Who goes on, and what is tried
    next, depends on losses alone; under `budget.time` also on how many trainings there is still time for.
    """
    shared, ends = search_expansion.shared(config), search_expansion.ends(config)
    task = sweep_tasks.prepare(shared, run, ends, callback)
    search_checks.require_rungs(config, len(task.shared.rows["train"]), ends)
    search_checks.require_bank(config, ends)
    if not run.resumed:
        shutil.rmtree(run.path / "members", ignore_errors=True)
        (run.path / search_board.TABLE).unlink(missing_ok=True)
    run.ranks.wait()  # until nothing of an earlier search is left
    board = search_board.read(config, run)
    task.shared.plan_time()
    timed = InTime(callback, run)
    try:
        while (wave := board.next_wave(trainings_left(board, run))) is not None:
            callback.say(in_words(board, wave))
            began = time.monotonic()
            try:
                losses = WaveTraining(task, board, wave, timed).losses()
            except Stopped:
                board.paused(wave, time.monotonic() - began)
                raise
            board.done(wave, losses, time.monotonic() - began)
            if run.ranks.any(callback.stop_requested()):
                raise Stopped(f"Stopped after wave {len(board.waves)}; checkpoints saved.")
    except Stopped:
        if not timed.over or board.best() is None:
            raise
        callback.say("The time is over: the members that train do not come to their end.")
    return ship(task, board, callback)


def ship(task: SweepTask, board: Board, callback: Callback) -> Scores:
    """Ship the best member as its recipe would ship its only one: copied, reloaded, scored.

    Raises:
        TrainingError: No member came to its end.
    """
    run, best = board.run, board.best()
    if best is None:
        raise TrainingError(
            "No member came to its end with a finite held-out loss. Lower search.space.train.learning_rate, or look at "
            "the held-out rows."
        )
    trial = board.trials[best]
    member = board.member(trial)
    run.note(elapsed_s=board.seconds)
    if run.ranks.first:
        board.write_importances()
        sweep.ship(run, member)
    run.ranks.wait()
    callback.say(
        f"Shipping {trial.name}, which has the lowest held-out loss. {len(board.settings)} settings took the steps of "
        f"{board.trained:.3g} trainings."
    )
    scores = task.single(trial.config, run).finish()
    for other in board.trials if run.ranks.first else ():  # nobody goes on from there
        shutil.rmtree(run.path / "members" / other.name / "checkpoints", ignore_errors=True)
    return scores


class WaveTraining:
    """Trains the members of a wave: those that a bank can hold in one, the others one after another."""

    def __init__(self, task: SweepTask, board: Board, wave: WaveRecord, callback: Callback) -> None:
        self.task, self.board, self.callback = task, board, callback
        trials = board.trials
        self.entries = [SweepMember(trials[each], board.member(trials[each])) for each in wave.trials]
        self.shares = dict(zip(wave.trials, [board.halving.shares[rung] for rung in wave.rungs], strict=True))
        self.begun = dict(zip(wave.trials, wave.begun, strict=True))
        held_out = len(task.shared.rows["held_out"])
        self.judges = {
            trial: judging_rows(board.config, held_out, rung=rung)
            for trial, rung in zip(wave.trials, wave.rungs, strict=True)
            if rung < board.halving.top
        }
        """Held-out rows on which each that does not come to its end is compared; None: all."""

    def losses(self) -> list[float]:
        """Held-out loss of each member where it is compared, infinite where it failed."""
        reasons = {entry.trial.number: search_checks.apart(self.board.config, entry.trial) for entry in self.entries}
        banked = [entry for entry in self.entries if reasons[entry.trial.number] is None]
        alone = [entry for entry in self.entries if reasons[entry.trial.number] is not None]
        trial_losses = dict(self._together(banked)) if banked else {}
        if alone:
            self.callback.say(f"{len(alone)} members, one after another: {reasons[alone[0].trial.number]}.")
            trial_losses |= {entry.trial.number: self._alone(entry) for entry in alone}
        return [trial_losses[entry.trial.number] for entry in self.entries]

    def _together(self, entries: Sequence[SweepMember]) -> Iterator[tuple[int, float]]:
        """Yield number and loss of each member of one bank."""
        trainer, loaded, progress = sweep.training(self.task, entries, self.callback)
        names = dict(zip(loaded.bank.members, entries, strict=True))
        for name, entry in names.items():
            trainer.members[name].until = self.shares[entry.trial.number]
            trainer.begun[name] = self.begun[entry.trial.number]
        try:
            trainer.work()
        except TrainingError:  # every member's, and each has its own below
            pass
        finally:
            progress.flush()
        run = self.board.run
        run.note(peak_bytes=max(run.manifest.get("peak_bytes", 0), peak_bytes(trainer.device)))
        for name, entry in names.items():
            member, number = trainer.members[name], entry.trial.number
            if member.error is not None:
                entry.run.note(status="failed", reason=str(member.error))
                yield number, math.inf
            elif self.shares[number] == 1:
                entry.run.note(batch=trainer.batch_facts(member))
                with trainer.final_values(name):
                    if run.ranks.first:
                        loaded.save(entry.run.adapter, partial(loaded.bank.save, name))
                yield number, self._at_the_end(entry)
            else:
                judge = partial(loaded.held_out_loss, self.judges[number])
                with loaded.bank.only(name):
                    yield number, member.judged(self._criterion(partial(trainer.shares.reading, judge)))

    def _alone(self, entry: SweepMember) -> float:
        """The loss of a member that trains as a run of its own."""
        run, own, share = self.board.run, entry.run, self.shares[entry.trial.number]
        self.callback.say(f"Member {entry.trial.name}:")
        member_results.copy_missing(run, own, "before.json")  # the backbone before training is the same for all
        single = self.task.single(entry.trial.config, own)
        try:
            if share == 1:
                if not own.adapter.exists():
                    single.train()
                return self._at_the_end(entry)
            judges = self.judges[entry.trial.number]
            task = self.task if judges is None else self.task.on_held_out(judges)
            judge: Any = task.single(entry.trial.config, own)
            live, trainer = single.begun(single.placement.unread(single.backbone, single.score_before))
            trainer.member.until = share
            trainer.work()
            return trainer.member.judged(self._criterion(partial(judge.held_out_loss, live)))
        except TrainingError as error:
            own.note(status="failed", reason=str(error))
            self.callback.say(f"{entry.trial.name} ends here; the others go on. {error}")
            return math.inf
        finally:
            member_results.copy_missing(own, run, "before.json")

    def _criterion(self, read: Callable[[], HeldOut]) -> Callable[[], float]:
        def criterion() -> float:
            loss, figures = read()
            return early_stopping.criterion({"held_out_loss": loss, **figures}, self.board.config.evaluate)

        return criterion

    def _at_the_end(self, entry: SweepMember) -> float:
        """The held-out loss, of all rows, of what a member would ship."""
        row = member_results.row(entry.trial, entry.run)
        which = "best" if self.board.config.save.ship == "best" else "last"
        loss = entry.run.ranks.agreed(row[which])
        return math.inf if loss is None else float(loss)


class InTime:
    """The callback of a search, which also asks for an end where there is only time to ship."""

    def __init__(self, callback: Callback, run: Run) -> None:
        self._callback, self._deadline = callback, run.deadline

    @property
    def over(self) -> bool:
        """Whether what comes after training must begin."""
        return self._deadline.limited and self._deadline.rest <= 0

    def step(self, record: dict[str, object], *, total: int) -> None:
        """Pass on a step."""
        self._callback.step(record, total=total)

    def say(self, text: str) -> None:
        """Pass on a sentence."""
        self._callback.say(text)

    def stop_requested(self) -> bool:
        """Whether to finish the step, save, and end."""
        return self.over or self._callback.stop_requested()


def trainings_left(board: Board, run: Run) -> float:
    """Whole trainings that there is time for, by the time that those took that are done; infinite without a limit.

    Raises:
        ConfigError: There is no time to train at all.
    """
    if not run.deadline.limited:
        return math.inf
    rest = run.deadline.rest
    if rest <= 0 and board.best() is None:
        raise ConfigError(
            f"budget: {run.deadline.spent:.0f} of {run.deadline.limit_s:.0f} s are spent, and scoring and reports take "
            "the rest: no time is left to train.\n  Write a larger budget.time, or fewer evaluate.answers."
        )
    return rest / (board.seconds / board.trained) if board.trained else rest


def judging_rows(config: RunConfig, rows: int, *, rung: int) -> Indices | None:
    """Held-out rows that decide who goes on from a rung, by chance but always the same; None: all of them.

    Those of a rung are among those of the next one.
    """
    wanted = config.search.rows_at(rung)
    if wanted is None or wanted >= rows:
        return None
    return np.sort(np.random.default_rng(config.seed).permutation(rows)[:wanted])


def in_words(board: Board, wave: WaveRecord) -> str:
    """A wave in a sentence."""
    halving, new = board.halving, sum(begun == 0 for begun in wave.begun)
    old = len(wave.trials) - new
    parts = [f"{old} {'goes' if old == 1 else 'go'} on"] if old else []
    parts += [f"{new} {'begins' if new == 1 else 'begin'}"] if new else []
    ways = dict.fromkeys(halving.in_words(rung) for rung in sorted(wave.rungs))
    return f"Wave {len(board.waves)}: {' and '.join(parts)}, to {' and '.join(ways)} of their steps."
