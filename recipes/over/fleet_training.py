"""The training of a fleet: its members in one bank, which they leave when they have ended and others join."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from workbench.config import RunConfig, model_heads
from workbench.config.expansions import fleet_expansion
from workbench.config.expansions.member_runs import Trial
from workbench.config.model_heads import HIDDEN, ModelHead
from workbench.errors import ConfigError, Stopped, TrainingError
from workbench.evaluation.generation import AnswerSamples
from workbench.models import backbones, model_sizes
from workbench.models.model_sizes import AdapterSize
from workbench.recipes.over.fleet_bank import FleetBank, FleetMember
from workbench.recipes.over.fleet_board import FleetBoard
from workbench.training import bank_trainer, capacity
from workbench.training.adapter_trainer import TrainTask
from workbench.training.bank_trainer import FleetTrainer
from workbench.training.callbacks import BankProgress, Callback
from workbench.training.step_metrics import peak_bytes


def known_head(config: RunConfig) -> ModelHead:
    """The head of members, as far as it is known before the rows are read: none where they name the classes."""
    named = config.task.output is None and config.task.head in ("classes", "tokens")
    return HIDDEN if named else model_heads.of(config)


def trials(config: RunConfig) -> list[Trial[RunConfig]]:
    """The runs of all members, with files of this machine in place of streamed rows.

    Raises:
        ConfigError: A bank cannot hold one of them.
    """
    all_ = fleet_expansion.trials(config)
    reasons = {trial.name: bank_trainer.refusal(trial.config) for trial in all_}
    refused = [f"fleet.members.{name}: {reason}." for name, reason in reasons.items() if reason is not None]
    if refused:
        raise ConfigError("\n  ".join([*refused, "Train it in a run of its own, or change that."]))
    return all_


def adapters(config: RunConfig, trials: Sequence[Trial[RunConfig]]) -> list[AdapterSize]:
    """Size of each member's adapter; where rows are labelled without its head."""
    known: dict[str, AdapterSize] = {}
    for trial in trials:
        method = trial.config.adapter
        if (key := method.model_dump_json()) not in known:
            known[key] = model_sizes.predict(config.model, method, task=known_head(config))
    return [known[trial.config.adapter.model_dump_json()] for trial in trials]


class FleetTraining:
    """Trains the members in the bank and those that wait, as `board` says who they are."""

    def __init__(
        self, config: RunConfig, board: FleetBoard, members: Mapping[str, FleetMember], callback: Callback
    ) -> None:
        self.board, self.members, self.callback = board, members, callback
        if not board.bank:
            board.take()
        now = list(board.bank)
        self.bank = FleetBank(config, members, now)
        self.shown = {bank_name: name for name, bank_name in self.bank.names.items()}
        """Name of each member by that in the bank."""
        self.progress = BankProgress(callback, self.shown, held_out=mean)
        tasks = {name: self.task(name) for name in members}
        device, bank = backbones.device(), self.bank
        self.trainer = FleetTrainer(
            bank.bank,
            [tasks[name] for name in now],
            every=list(tasks.values()),
            freezer=bank.freezer(),
            objectives=[bank.objective(name) for name in now],
            predict=bank.predict,
            compute=bank.backbone.compute,
            tokens=max(
                capacity.tokens_per_device(
                    task.config,
                    task.train,
                    device,
                    width=bank.width,
                    members=board.at_once or 1,
                )
                for task in tasks.values()
            ),
            callback=self.progress,
            reads_packed=bank.reads_packed(),
        )
        self.tasks, self.errors = tasks, list[TrainingError]()
        self.trainer.begun |= {bank.names[name]: begun for name, begun in board.bank.items()}

    def task(self, name: str) -> TrainTask:
        """Rows, settings and directory of a member's training."""
        member, parts = self.members[name], dict[str, float]()
        samples: AnswerSamples[Any] = AnswerSamples(member.run, member.single.sampled)

        def held_out_loss() -> float:
            loss = self.bank.held_out_loss(name, parts)
            with self.bank.bank.only(self.bank.names[name]):
                samples.take(self.bank.model_of(name), step=self.trainer.members[self.bank.names[name]].progress.step)
            return loss

        return TrainTask(member.train, held_out_loss, member.trial.config, member.run, held_out_parts=parts)

    def enter(self, name: str) -> None:
        """Note a member that begins to train, and what it answers before."""
        member = self.members[name]
        member.run.note(status="running", model=self.bank.facts(name))
        if not any(member.run.checkpoints.glob("step-*")) and member.trial.config.evaluate.every is not None:
            with self.bank.bank.only(self.bank.names[name]):
                samples: AnswerSamples[Any] = AnswerSamples(member.run, member.single.sampled)
                samples.begin(self.bank.model_of(name))

    def work(self) -> None:
        """Train until nobody is left; raises Stopped after checkpoints, and an error where all members failed."""
        board, trainer = self.board, self.trainer
        for name in board.bank:
            self.enter(name)
        board.write()
        self.callback.say(self.in_words())
        while board.bank:
            try:
                ended = trainer.work_until_one_ends()
            finally:
                self.progress.flush()
                board.run.note(peak_bytes=max(board.run.manifest.get("peak_bytes", 0), peak_bytes(trainer.device)))
            for bank_name in ended:
                self.export(self.shown[bank_name])
            self.change([self.shown[bank_name] for bank_name in ended])
            if board.bank and board.run.ranks.any(self.callback.stop_requested()):
                raise Stopped(f"Stopped between two steps; {len(board.bank)} members have saved.")
        if not board.run.ranks.any(any(member.run.adapter.exists() for member in self.members.values())):
            raise self.errors[0]

    def export(self, name: str) -> None:
        """Save the adapter of a member that came to its end."""
        bank_name, run = self.bank.names[name], self.members[name].run
        member = self.trainer.members[bank_name]
        if member.error is not None:
            self.errors.append(member.error)
            return
        run.note(batch=self.trainer.batch_facts(member))
        run.note(status="trained", peak_bytes=peak_bytes(self.trainer.device))
        with self.trainer.final_values(bank_name):
            if run.ranks.first:
                self.bank.save(name, run.adapter)

    def change(self, ended: Sequence[str]) -> None:
        """Let members leave and others join."""
        board, trainer = self.board, self.trainer
        steps = {self.shown[each]: member.progress.step for each, member in trainer.members.items()}
        came = board.change(ended, steps)
        leaving = list(ended)
        for name in leaving[:-1]:
            self._leave(name)
        for name in came[:1]:  # a bank is never without a member
            self._join(name)
        if board.bank:
            self._leave(leaving[-1])
        for name in came[1:]:
            self._join(name)
        trainer.begun.update({self.bank.names[name]: begun for name, begun in board.bank.items()})
        board.write()
        if board.bank:
            self.callback.say(f"{', '.join(ended)} {'leaves' if len(ended) == 1 else 'leave'}. {self.in_words(came)}")

    def _join(self, name: str) -> None:
        bank_name = self.bank.begin(name)
        self.shown[bank_name] = name
        self.trainer.join(bank_name, self.tasks[name], self.bank.objective(name), freezer=self.bank.freezer())
        self.enter(name)

    def _leave(self, name: str) -> None:
        self.trainer.leave(self.bank.names[name])
        self.bank.leave(name)

    def in_words(self, came: Sequence[str] = ()) -> str:
        """The members that train and those that wait."""
        joined = f"{', '.join(came)} {'joins' if len(came) == 1 else 'join'}: " if came else ""
        waiting = len(self.board.waiting)
        rest = f", {waiting} {'waits' if waiting == 1 else 'wait'}" if waiting else ""
        one = len(self.board.bank) == 1
        return f"{joined}{len(self.board.bank)} {'member trains' if one else 'members train'} in one bank{rest}."
