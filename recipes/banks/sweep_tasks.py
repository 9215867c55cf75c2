"""Tasks of a sweep's members: text, as recipes sft and mlm, judged answers, as prefer and reward, or classes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, from_numpy

from workbench import evaluation
from workbench.adapters import anatomy
from workbench.adapters.banks.bank import Bank
from workbench.config import RunConfig, model_heads
from workbench.config.expansions.member_runs import Trial
from workbench.config.model_heads import ModelHead
from workbench.data import mixture
from workbench.data.batching import Examples, Indices, MicroBatch
from workbench.data.held_out_split import Splits
from workbench.data.labelled.class_sampling import sampled_rows
from workbench.data.labelled.labelled_data import ClassSplits, LabelledSet
from workbench.data.text.preference_pairs import ROW, PreferenceSet, RatedPairs
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.losses.criterion import criterion
from workbench.models import classifier, exported, output_heads, reward_model
from workbench.models.backbones import Backbone
from workbench.models.reward_model import RewardModel
from workbench.recipes.labels import classify
from workbench.recipes.labels.classify import ClassRun
from workbench.recipes.preferences import prefer, reward
from workbench.recipes.preferences.prefer import PreferenceRun
from workbench.recipes.preferences.process_reward import ProcessRun
from workbench.recipes.preferences.reward import RewardRun
from workbench.recipes.text import sft
from workbench.recipes.text.sft import TextRun
from workbench.runs import provenance
from workbench.runs.run_directory import Run
from workbench.training import preference_objective, preflight
from workbench.training.callbacks import Callback
from workbench.training.freezing import freezer as freezing
from workbench.training.freezing.freezer import Freezer

Objective = Callable[[Tensor, Tensor, float], Tensor]
Trials = Sequence[Trial[RunConfig]]
R = TypeVar("R", TokenizedSet, LabelledSet)


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
    held_out_loss: Callable[[Indices | None], float]
    """Inside the bank's `only`: of some held-out rows; None: of all."""
    save: Callable[[Path, Callable[[Path], None]], None]
    """Writes a folder to ship, with what writes the adapter into it."""
    own_losses: Mapping[str, Callable[[], float]] = field(default_factory=dict)
    """Held-out loss of members that have held-out rows of their own, by name, inside the bank's `only`."""


@dataclass(frozen=True)
class SweepTask(ABC):
    """The task of the members, together or one after another."""

    shared: TextRun | ClassRun | RewardRun | ProcessRun
    """The run of what all members have in common."""

    def single(self, config: RunConfig, run: Run) -> TextRun | ClassRun | RewardRun | ProcessRun:
        """A member as a run of its own, with the same data."""
        return replace(self.shared, config=config, run=run)

    @abstractmethod
    def on_held_out(self, rows: Indices) -> SweepTask:
        """The same with these held-out rows alone."""

    @abstractmethod
    def load_bank(self, trials: Trials) -> SweepBank:
        """The members over one loaded backbone, at their start."""


def prepare(config: RunConfig, run: Run, trials: Trials, callback: Callback) -> SweepTask:
    """The task with its data, checked for every member."""
    if config.recipe == "prefer":
        tokenizer, template, pairs = prefer.prepare(config)
        require_members(config, trials, pairs.map(lambda split: split.answers))
        provenance.note_data(run, pairs.facts())
        judged = prefer.begin(config, run, callback, tokenizer, template, pairs).asked()
        return PreferenceTask(replace(judged, ruler=config.prefer))
    if config.recipe == "reward":
        return RewardTask.of(config, run, trials, callback)
    if config.recipe != "classify":
        text = TextRun(config, run, callback, *sft.prepare(config, run))
        require_members(config, trials, text.data)
        return TextTask(text)
    reader, data, _ = classify.prepare(config)
    require_members(config, trials, data)
    classify.begin(run, data)
    return ClassTask(ClassRun(config, run, callback, reader, data))


class TextTask(SweepTask):
    """Next or hidden tokens."""

    shared: TextRun

    def on_held_out(self, rows: Indices) -> TextTask:
        data = self.shared.data
        return TextTask(replace(self.shared, data=data._replace(held_out=data.held_out.subset(rows))))

    def load_bank(self, trials: Trials) -> SweepBank:
        text = self.shared
        backbone = text.placement.unread(text.backbone, text.score_before)
        together, freezer = _attach(backbone, text.config, trials)
        with together.only(together.members[0]):
            head = output_heads.find(together.model, backbone.model)
        stop = evaluation.stop_tokens(text.tokenizer, text.data.train)

        objective = sft.next_token_objective(head, text.config.regularise)
        return SweepBank(
            bank=together,
            freezer=freezer,
            backbone=backbone,
            predict=lambda batch: head.supervised(together.model, batch.inputs, batch.positions_N),
            reads_packed=True,
            train=[mixture.mixed(text.data.train, trial.config) for trial in trials],
            objectives=[objective] * len(trials),
            held_out_loss=lambda rows: (
                evaluation.likelihood(together.model, head, _some(text.data.held_out, rows)).loss
            ),
            save=lambda folder, adapter: exported.save(
                together.model, folder, text.tokenizer, text.template, stop, adapter=adapter
            ),
        )


class PreferenceTask(SweepTask):
    """Judged answers; all members are measured by the loss of the first."""

    shared: PreferenceRun

    def on_held_out(self, rows: Indices) -> PreferenceTask:
        return PreferenceTask(self.shared.on_held_out(rows))

    def load_bank(self, trials: Trials) -> SweepBank:
        judged = self.shared
        backbone = judged.placement.unread(judged.backbone, judged.score_before)
        together, freezer = _attach(backbone, judged.config, trials)
        with together.only(together.members[0]):
            live = judged.assemble(together.model, backbone)
        head = live.head

        def objective(trial: Trial[RunConfig]) -> Objective:
            section = trial.config.prefer
            own = judged.objective(section, lambda: section.beta)

            def loss(hidden_ND: Tensor, labels_N: Tensor, scale: float) -> Tensor:
                rows = int(labels_N[:, ROW].max()) + 1
                return own(preference_objective.of_hidden(hidden_ND, labels_N, head), labels_N, rows=rows, scale=scale)

            return loss

        return SweepBank(
            bank=together,
            freezer=freezer,
            backbone=backbone,
            predict=lambda batch: head.supervised(together.model, batch.inputs, batch.positions_N),
            reads_packed=True,
            train=[mixture.mixed(judged.pairs.train, trial.config) for trial in trials],
            objectives=[objective(trial) for trial in trials],
            held_out_loss=lambda rows: (judged if rows is None else judged.on_held_out(rows)).held_out_loss(live)[0],
            save=lambda folder, adapter: exported.save(
                together.model, folder, judged.tokenizer, judged.template, live.stop, adapter=adapter
            ),
        )


@dataclass(frozen=True)
class RewardTask(SweepTask):
    """Rewards of pairs or steps; of pairs, members may have folds of their own."""

    shared: RewardRun | ProcessRun
    folds: Mapping[int, RewardRun] = field(default_factory=dict)
    """The run of each fold by its number; none where all members have the same rows."""

    @classmethod
    def of(cls, config: RunConfig, run: Run, trials: Trials, callback: Callback) -> RewardTask:
        """The task with its data, checked for every member."""
        shared = reward.begin(config, run, callback)
        for other in {trial.config.adapter.model_dump_json(): trial.config for trial in trials}.values():
            preflight.require_backbone(other, list(shared.rows.values()), model_heads.of(other))
        if config.data.fold.of is None:
            return cls(shared)
        runs = {trial.config.data.fold.number: reward.begin(trial.config, run, callback) for trial in trials}
        return cls(shared, {number: each for number, each in runs.items() if isinstance(each, RewardRun)})

    def single(self, config: RunConfig, run: Run) -> RewardRun | ProcessRun:
        own = replace(self._part(config), config=config, run=run)
        own.note_rows()
        return own

    def _part(self, config: RunConfig) -> RewardRun | ProcessRun:
        return self.folds.get(config.data.fold.number, self.shared)

    def on_held_out(self, rows: Indices) -> RewardTask:
        return replace(self, shared=self.shared.on_held_out(rows))

    def load_bank(self, trials: Trials) -> SweepBank:
        shared, config = self.shared, self.shared.config
        assert isinstance(shared, RewardRun), "steps are rated by one member after another"
        backbone = shared.backbone()
        together, freezer = _attach(backbone, config, trials)
        for other in {trial.config.seed: trial.config for trial in trials if trial.config.seed != config.seed}.values():
            members = [
                name for name, trial in zip(together.members, trials, strict=True) if trial.config.seed == other.seed
            ]
            _begin_heads(together, members, shared, model_heads.of(other))
        with together.only(together.members[0]):
            live = shared.assemble(together.model, backbone)
        parts = [replace(self._part(trial.config), config=trial.config) for trial in trials]
        pairs = [part.pairs for part in parts if isinstance(part, RewardRun)]

        def objective(train: PreferenceSet, own: RunConfig) -> Objective:
            loss = reward_model.judged_loss(train, centre=own.reward.centre)
            return lambda outputs, labels, scale: loss(outputs, labels[::2, 0].cpu().numpy() // 2, scale)

        return SweepBank(
            bank=together,
            freezer=freezer,
            backbone=backbone,
            predict=lambda batch: live.step_logits(batch),
            reads_packed=all(live.classifier.reads_packed(trial.config.adapter) for trial in trials),
            train=[
                mixture.mixed(RatedPairs(own.train.answers, paired=True), trial.config)
                for own, trial in zip(pairs, trials, strict=True)
            ],
            objectives=[objective(own.train, trial.config) for own, trial in zip(pairs, trials, strict=True)],
            held_out_loss=lambda rows: (shared if rows is None else shared.on_held_out(rows)).held_out_loss(live)[0],
            save=lambda folder, adapter: reward_model.save(live, folder, adapter=adapter),
            own_losses={
                name: partial(_first_of, part.held_out_loss, live)
                for name, part in zip(together.members, parts, strict=True)
                if self.folds
            },
        )


def _first_of(measure: Callable[[RewardModel], tuple[float, object]], live: RewardModel) -> float:
    return measure(live)[0]


class ClassTask(SweepTask):
    """Labels of rows."""

    shared: ClassRun

    def on_held_out(self, rows: Indices) -> ClassTask:
        data = self.shared.data
        return ClassTask(replace(self.shared, data=data._replace(held_out=data.held_out.subset(rows))))

    def load_bank(self, trials: Trials) -> SweepBank:
        classes, data, seed = self.shared, self.shared.data, self.shared.config.seed
        backbone = classes.backbone()
        together, freezer = _attach(backbone, classes.config, trials)
        for other in {trial.config.seed for trial in trials} - {seed}:
            members = [name for name, trial in zip(together.members, trials, strict=True) if trial.config.seed == other]
            _begin_heads(together, members, classes, classifier.task(data.labels, seed=other))
        with together.only(together.members[0]):
            model = classes.assemble(together.model, backbone)
        targets_NC = from_numpy(data.train.targets_NC)
        return SweepBank(
            bank=together,
            freezer=freezer,
            backbone=backbone,
            predict=model.outputs,
            reads_packed=all(model.reads_packed(trial.config.adapter) for trial in trials),
            train=[sampled_rows(data.train, trial.config) for trial in trials],
            objectives=[criterion(trial.config.classes, targets_NC) for trial in trials],
            held_out_loss=lambda rows: classify.score(model, _some(data.held_out, rows))[0]["loss"],
            save=lambda folder, adapter: classifier.save(model, folder, adapter=adapter),
        )


def _some(held_out: R, rows: Indices | None) -> R:
    return held_out if rows is None else held_out.subset(rows)


def require_members(config: RunConfig, trials: Trials, data: Splits[TokenizedSet] | ClassSplits) -> None:
    """Refuse what would fail or teach nothing in a member with another adapter than `config`, which is known good."""
    adapters = {trial.config.adapter.model_dump_json(): trial.config for trial in trials}
    adapters.pop(config.adapter.model_dump_json(), None)
    for other in adapters.values():
        if isinstance(data, ClassSplits):
            splits = list(data.rows.named().values())
            preflight.require_backbone(other, splits, classifier.task(data.labels, seed=config.seed))
        else:
            preflight.require_runnable(other, data)


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
def _begin_heads(together: Bank, members: Sequence[str], run: ClassRun | RewardRun, task: ModelHead) -> None:
    """Give members the head that their seed draws, as if they trained alone."""
    fresh = run.loader(run.config.model, run.vocabulary, task=task, waiting=run.placement.waiting)
    for member in members:
        own = together.parameters_alone(member)
        for head in anatomy.fresh_heads(fresh.model):
            for name, value in fresh.model.get_submodule(head).named_parameters():
                own[f"base_model.model.{head}.modules_to_save.default.{name}"].copy_(value)
