"""The members of a sweep or search: runs of any task with a bank, together over one backbone or one after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.adapters import anatomy
from workbench.adapters.banks.bank import Bank
from workbench.config import RunConfig
from workbench.config.expansions.member_runs import Trial
from workbench.config.sections.basic_sections import HeldOutFold
from workbench.data.batching import Examples, Indices, MicroBatch
from workbench.models.backbones import Backbone
from workbench.recipes.single import start_adapter
from workbench.recipes.single.single_run import SingleRun
from workbench.recipes.task import implementation
from workbench.runs.run_directory import Run
from workbench.training.bank_trainer import Objective
from workbench.training.callbacks import Callback, Silent
from workbench.training.freezing import freezer as freezing
from workbench.training.freezing.freezer import Freezer

Trials = Sequence[Trial[RunConfig]]
HeldOut = tuple[float, Mapping[str, float]]
"""Held-out loss, and further figures by their names in metrics.jsonl."""


@dataclass(frozen=True)
class SweepBank:
    """The members of a sweep in one bank, and all that their training needs."""

    bank: Bank
    freezer: Freezer
    backbone: Backbone
    predict: Callable[[MicroBatch], Tensor]
    """Inside the bank's `route`: what the objectives want of each label."""
    reads_packed: bool
    """Whether it finds them in rows that are packed into one sequence."""
    train: list[Examples]
    objectives: list[Objective]
    held_out_loss: Callable[[Indices | None], HeldOut]
    """Inside the bank's `only`: of some held-out rows; None: of all."""
    save: Callable[[Path, Callable[[Path], None]], None]
    """Writes a folder to ship, with what writes the adapter into it."""
    own_losses: Mapping[str, Callable[[], HeldOut]] = field(default_factory=dict)
    """Held-out loss of members that have held-out rows of their own, by name, inside the bank's `only`."""


@dataclass(frozen=True)
class SweepTask:
    """The runs of the members, together or one after another."""

    shared: SingleRun[Any, Any]
    """The run of what all members have in common."""
    folds: Mapping[HeldOutFold, SingleRun[Any, Any]] = field(default_factory=dict)
    """The run of each fold; none where all members have the same rows."""

    def single(self, config: RunConfig, run: Run) -> SingleRun[Any, Any]:
        """A member as a run of its own, with the same data."""
        return self._part(config).as_member(config, run)

    def _part(self, config: RunConfig) -> SingleRun[Any, Any]:
        return self.folds.get(config.data.fold, self.shared)

    def on_held_out(self, rows: Indices) -> SweepTask:
        """The same with these held-out rows alone."""
        return replace(self, shared=self.shared.on_held_out(rows))

    def load_bank(self, trials: Trials) -> SweepBank:
        """The members over one loaded backbone, at their start."""
        shared, seed = self.shared, self.shared.config.seed
        backbone = shared.placement.unread(shared.backbone, shared.score_before)
        together, freezer = _attach(backbone, shared.config, trials)
        for other in {trial.config.seed for trial in trials} - {seed} if shared.fresh_head else ():
            members = [name for name, trial in zip(together.members, trials, strict=True) if trial.config.seed == other]
            _begin_heads(together, members, replace(shared, config=shared.config.model_copy(update={"seed": other})))
        with together.only(together.members[0]):
            live = shared.assemble(together.model, backbone)
        parts = [replace(self._part(trial.config), config=trial.config) for trial in trials]
        own_losses = {
            name: lambda part=part: part.held_out_loss(live) for name, part in zip(together.members, parts, strict=True)
        }
        return SweepBank(
            bank=together,
            freezer=freezer,
            backbone=backbone,
            predict=lambda batch: shared.member_outputs(live, batch),
            reads_packed=all(part.packs(live) for part in parts),
            train=[part.sampled_rows for part in parts],
            objectives=[part.member_loss(live) for part in parts],
            held_out_loss=lambda rows: (shared if rows is None else shared.on_held_out(rows)).held_out_loss(live),
            save=lambda folder, adapter: shared.save(live, folder, adapter=adapter),
            own_losses=own_losses if self.folds else {},
        )


def prepare(config: RunConfig, run: Run, trials: Trials, callback: Callback) -> SweepTask:
    """The members' runs with their data, checked for every member."""
    task = implementation(config)
    shared = task.begin(config, run, callback).for_members()
    require_members(config, trials, shared.splits)
    if config.data.fold.of is None:
        return SweepTask(shared)
    folds = {config.data.fold: shared}
    for trial in trials:
        if trial.config.data.fold not in folds:
            own = task.begin(trial.config, run, Silent()).for_members()  # what is said of the first is said of all
            folds[trial.config.data.fold] = replace(own, callback=callback)
    return SweepTask(shared, folds)


def require_members(config: RunConfig, trials: Trials, data: Any) -> None:
    """Refuse what would fail or teach nothing in a member with another adapter than `config`, which is known good.

    Args:
        data: The splits of an inspection or of a run.
    """
    for trial in trials:
        start_adapter.require(trial.config)
    adapters = {trial.config.adapter.model_dump_json(): trial.config for trial in trials}
    adapters.pop(config.adapter.model_dump_json(), None)
    for other in adapters.values():
        implementation(other).require(other, data)


def _attach(backbone: Backbone, shared: RunConfig, trials: Trials) -> tuple[Bank, Freezer]:
    """A bare backbone with a fresh adapter for each member, none where the policy freezes for good."""
    return freezing.attach_bank(
        backbone.model,
        shared,
        [trial.config.adapter for trial in trials],
        seeds=[trial.config.seed for trial in trials],
        numbers=[trial.number for trial in trials],
    )


@torch.no_grad()
def _begin_heads(together: Bank, members: Sequence[str], run: SingleRun[Any, Any]) -> None:
    """Give members the head that the seed of `run` makes, as if they trained alone."""
    fresh = run.loader(run.config.model, run.vocabulary, task=run.task, waiting=run.placement.waiting)
    for member in members:
        own = together.parameters_alone(member)
        for head in anatomy.fresh_heads(fresh.model):
            for name, value in fresh.model.get_submodule(head).named_parameters():
                own[f"base_model.model.{head}.modules_to_save.default.{name}"].copy_(value)
