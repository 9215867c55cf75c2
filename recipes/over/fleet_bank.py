"""The bank of a fleet: members with rows, labels and heads of their own over one loaded backbone, which come and go."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch import Tensor

from workbench.adapters import anatomy
from workbench.adapters.banks import bank
from workbench.adapters.banks.bank import Bank
from workbench.config import RunConfig
from workbench.config.expansions.member_runs import Trial
from workbench.data.batching import Examples, MicroBatch
from workbench.models import backbones, model_sizes
from workbench.models.backbones import Backbone, Loader
from workbench.recipes.single.single_run import SingleRun
from workbench.recipes.task import implementation
from workbench.runs.run_directory import Run
from workbench.training.bank_trainer import Objective
from workbench.training.callbacks import Callback
from workbench.training.freezing import freezer as freezing
from workbench.training.freezing.freezer import Freezer

Single = SingleRun[Any, Any]
"""A member as a run of its own."""


@dataclass(frozen=True)
class FleetMember:
    """A member with its rows, and the run directory of its own."""

    trial: Trial[RunConfig]
    single: Single

    @property
    def run(self) -> Run:
        """Where its metrics, checkpoints, adapter and scores are."""
        return self.single.run

    @property
    def train(self) -> Examples:
        """The training rows as its objective wants them."""
        return self.single.sampled_rows


def prepared(trial: Trial[RunConfig], run: Run, callback: Callback, *, loader: Loader = backbones.load) -> FleetMember:
    """A member with its data, which is refused where its run would be."""
    return FleetMember(trial, implementation(trial.config).begin(trial.config, run, callback, loader=loader))


class FleetBank:
    """A loaded backbone under the adapters of those members that train now.

    Args:
        members: All that will ever train here, by name.
        now: Names of those that do from the beginning.
    """

    def __init__(self, config: RunConfig, members: Mapping[str, FleetMember], now: Sequence[str]) -> None:
        self.config, self.members = config, members
        first = members[now[0]].single
        self.backbone = first.placement.unread(first.backbone, self._score_before)
        model = self.backbone.model
        self._layers = freezing.layers_of(model, config)
        self.bank: Bank = bank.attach(
            model,
            [members[name].trial.config.adapter for name in now],
            seeds=[members[name].trial.config.seed for name in now],
            numbers=[members[name].trial.number for name in now],
            later=[each.trial.config.adapter for each in members.values()],
        )
        self.names = dict(zip(now, self.bank.members, strict=True))
        """Name in the bank of each that trains now."""
        for name in now:
            self.give_head(name)
        with self.bank.only(self.names[now[0]]):
            self.live = first.assemble(self.bank.model, self.backbone)
            self.width = first.width(self.live)

    def _score_before(self, backbone: Backbone) -> bool:
        """Score the backbone on the rows of all members; returns whether it was, and cut where processes share it."""
        singles = [each.single for each in self.members.values()]
        reading = cache(singles[0].placement.reading)  # a backbone can be cut once
        starts = [(single, single.untrained(backbone)) for single in singles if single.unscored]
        starts = [(single, start) for single, start in starts if start is not None]
        for single, start in starts:
            single.callback.say("Scoring the backbone ...")
            replace(single, reading=reading).write_before(start)
        return bool(starts)

    def begin(self, name: str) -> str:
        """Give a member its fresh adapter; returns its name in the bank."""
        trial = self.members[name].trial
        self.names[name] = self.bank.begin(trial.config.adapter, seed=trial.config.seed, number=trial.number)
        self.give_head(name)
        return self.names[name]

    def leave(self, name: str) -> None:
        """Forget a member, one of several."""
        self.bank.leave(self.names.pop(name))

    def freezer(self) -> Freezer:
        """The freezer of the model as it is now."""
        return Freezer(self.bank.model, self.backbone.model, self._layers, self.config.freeze, seed=self.config.seed)

    def held_out_loss(self, name: str, parts: dict[str, float]) -> float:
        """Mean loss of a member's present values on its own held-out rows; `parts` takes further figures."""
        single = self.members[name].single
        with self.bank.only(self.names[name]):
            loss, figures = single.held_out_loss(self.model_of(name))
        parts.update(figures)
        return float(loss)

    def facts(self, name: str) -> dict[str, Any]:
        """The facts of a run with this member alone."""
        return model_sizes.member_facts(self.members[name].trial.config, self.backbone, self.bank, self.names[name])

    def give_head(self, name: str) -> None:
        """Give a member the head that it has alone, where the backbone has a fresh one."""
        single = self.members[name].single
        if not single.fresh_head:
            return
        waiting = single.placement.waiting
        fresh = single.loader(single.config.model, single.vocabulary, task=single.task, waiting=waiting).model
        for head in anatomy.fresh_heads(fresh):
            own = copy.deepcopy(fresh.get_submodule(head)).to(backbones.device())
            self.bank.give_head(self.names[name], head, own)

    def model_of(self, name: str) -> Any:
        """The model with what scoring a member needs, inside the bank's `only`."""
        return self.members[name].single.of_member(self.live)

    def predict(self, batch: MicroBatch) -> Tensor:
        """Outputs for each label, inside the bank's `route`."""
        return next(iter(self.members.values())).single.member_outputs(self.live, batch)

    def reads_packed(self) -> bool:
        """Whether `predict` finds them in rows that are packed into one sequence."""
        return all(each.single.packs(self.live) for each in self.members.values())

    def objective(self, name: str) -> Objective:
        """The loss of a member."""
        return self.members[name].single.member_loss(self.live)

    def save(self, name: str, folder: Path) -> None:
        """Write the folder that a member ships."""
        self.members[name].single.save(self.model_of(name), folder, adapter=partial(self.bank.save, self.names[name]))
