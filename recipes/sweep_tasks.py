"""Tasks of a sweep's members: text, as recipes sft and mlm, or classes, as recipe classify."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, from_numpy
from transformers import PreTrainedTokenizerBase

from workbench import evaluation, losses
from workbench.adapters import anatomy
from workbench.adapters.bank import Bank
from workbench.config import RunConfig, tasks
from workbench.config.sweep_expansion import Trial
from workbench.data.batching import Examples, MicroBatch
from workbench.data.labelled.class_sampling import balanced
from workbench.data.labelled.labelled_data import ClassSplits
from workbench.data.text.chat import Template
from workbench.data.text.token_masking import Masking
from workbench.data.text.tokenized import Splits
from workbench.losses.criterion import criterion
from workbench.models import backbones, classifier, exported, model_summary, output_heads
from workbench.models.backbones import Backbone
from workbench.recipes import classify, sft
from workbench.runs.run_directory import Run
from workbench.training import preflight
from workbench.training.callbacks import Callback
from workbench.training.freezing import freezer as freezing
from workbench.training.freezing.freezer import Freezer

Objective = Callable[[Tensor, Tensor, float], Tensor]


@dataclass(frozen=True)
class SweepBank:
    """The members of a sweep in one bank, and all that their training needs."""

    bank: Bank
    freezer: Freezer
    backbone: Backbone
    predict: Callable[[MicroBatch], Tensor]
    """Inside the bank's `route`: what the objectives want of each label."""
    train: list[Examples]
    objectives: list[Objective]
    held_out_loss: Callable[[], float]
    """Inside the bank's `only`."""
    save: Callable[[Path, Callable[[Path], None]], None]
    """Writes a folder to ship, with what writes the adapter into it."""


class SweepTask(Protocol):
    """Task of the members, together or one after another."""

    def bench(self, run: Run, trials: Sequence[Trial[RunConfig]], watcher: Callback) -> SweepBank:
        """The members over one loaded backbone, at their start."""

    def alone(self, run: Run, config: RunConfig, watcher: Callback) -> None:
        """Train one run by itself and save its adapter."""

    def finish(self, run: Run, config: RunConfig, watcher: Callback) -> dict[str, Any]:
        """Score what the run ships."""


@dataclass(frozen=True)
class TextTask:
    """Next or hidden tokens."""

    config: RunConfig
    tokenizer: PreTrainedTokenizerBase
    template: Template | Masking
    data: Splits

    @classmethod
    def prepare(cls, config: RunConfig, run: Run, trials: Sequence[Trial[RunConfig]]) -> TextTask:
        """Data, checked for every member."""
        tokenizer, template, data = sft.prepare(config, run)
        require_members(config, trials, data)
        return cls(config, tokenizer, template, data)

    def bench(self, run: Run, trials: Sequence[Trial[RunConfig]], watcher: Callback) -> SweepBank:
        backbone = backbones.load(self.config.model, self.tokenizer, task=tasks.of(self.config))
        watcher.say(model_summary.storage(backbone, self.config.adapter))
        sft.score_before(self.config, run, backbone, self.data, self.tokenizer, self.template, watcher)
        together, freezer = _attach(backbone, self.config, trials)
        with together.only(together.members[0]):
            head = output_heads.find(together.model, backbone.model)
        stop = evaluation.stop_tokens(self.tokenizer, self.data.train)

        def objective(hidden_ND: Tensor, labels_N: Tensor, scale: float) -> Tensor:
            return losses.next_token(
                hidden_ND, labels_N, head.project, vocabulary=head.vocabulary, weights=head.trainable(), scale=scale
            )

        return SweepBank(
            bank=together,
            freezer=freezer,
            backbone=backbone,
            predict=lambda batch: head.hidden(together.model, batch.inputs).flatten(0, 1)[batch.positions_N],
            train=[self.data.train] * len(trials),
            objectives=[objective] * len(trials),
            held_out_loss=lambda: evaluation.likelihood(together.model, head, self.data.held_out).loss,
            save=lambda folder, adapter: exported.save(
                together.model, folder, self.tokenizer, self.template, stop, adapter=adapter
            ),
        )

    def alone(self, run: Run, config: RunConfig, watcher: Callback) -> None:
        sft.train(config, run, self.data, self.tokenizer, self.template, watcher)

    def finish(self, run: Run, config: RunConfig, watcher: Callback) -> dict[str, Any]:
        return sft.finish(config, run, self.data, watcher)


@dataclass(frozen=True)
class ClassTask:
    """Labels of rows."""

    config: RunConfig
    tokenizer: PreTrainedTokenizerBase
    data: ClassSplits

    @classmethod
    def prepare(cls, config: RunConfig, run: Run, trials: Sequence[Trial[RunConfig]]) -> ClassTask:
        """Data, checked for every member."""
        tokenizer, data, _ = classify.prepare(config)
        require_members(config, trials, data)
        classify.begin(run, data)
        return cls(config, tokenizer, data)

    def bench(self, run: Run, trials: Sequence[Trial[RunConfig]], watcher: Callback) -> SweepBank:
        backbone = self._backbone(self.config.seed)
        watcher.say(model_summary.storage(backbone, self.config.adapter))
        together, freezer = _attach(backbone, self.config, trials)
        for seed in {trial.config.seed for trial in trials} - {self.config.seed}:
            members = [name for name, trial in zip(together.members, trials, strict=True) if trial.config.seed == seed]
            _begin_heads(together, members, self._backbone(seed))
        with together.only(together.members[0]):
            model = classifier.classification_model(together.model, backbone.model, self.tokenizer, self.data.labels)
        targets_NC = from_numpy(self.data.train.targets_NC)
        return SweepBank(
            bank=together,
            freezer=freezer,
            backbone=backbone,
            predict=model.outputs,
            train=[balanced(self.data.train, trial.config) for trial in trials],
            objectives=[criterion(trial.config.classes, targets_NC) for trial in trials],
            held_out_loss=lambda: classify.score(model, self.data.held_out)[0]["loss"],
            save=lambda folder, adapter: classifier.save(model, folder, adapter=adapter),
        )

    def alone(self, run: Run, config: RunConfig, watcher: Callback) -> None:
        classify.train(config, run, self.data, self.tokenizer, watcher)

    def finish(self, run: Run, config: RunConfig, watcher: Callback) -> dict[str, Any]:
        return classify.finish(config, run, self.data, watcher)

    def _backbone(self, seed: int) -> Backbone:
        task = classifier.task(self.data.labels, seed=seed)
        return backbones.load(self.config.model, self.tokenizer, task=task)


def require_members(config: RunConfig, trials: Sequence[Trial[RunConfig]], data: Splits | ClassSplits) -> None:
    """Refuse what would fail or teach nothing in a member with another adapter than `config`, which is known good."""
    adapters = {trial.config.adapter.model_dump_json(): trial.config for trial in trials}
    adapters.pop(config.adapter.model_dump_json(), None)
    for other in adapters.values():
        if isinstance(data, ClassSplits):
            splits = [data.train, data.held_out, *([data.test] if data.test else [])]
            preflight.require_backbone(other, splits, classifier.task(data.labels, seed=config.seed))
        else:
            preflight.require_runnable(other, data)


def _attach(backbone: Backbone, shared: RunConfig, trials: Sequence[Trial[RunConfig]]) -> tuple[Bank, Freezer]:
    methods, seeds = [trial.config.adapter for trial in trials], [trial.config.seed for trial in trials]
    return freezing.attach_bank(backbone.model, shared, methods, seeds=seeds)


@torch.no_grad()
def _begin_heads(together: Bank, members: Sequence[str], fresh: Backbone) -> None:
    """Give members the head that their seed draws, as if they trained alone."""
    for member in members:
        own = together.parameters_of(member)
        for head in anatomy.fresh_heads(fresh.model):
            for name, value in fresh.model.get_submodule(head).named_parameters():
                own[f"base_model.model.{head}.modules_to_save.{member}.{name}"].copy_(value)
