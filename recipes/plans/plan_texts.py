"""Runs of language models as a plan sees them: of recipe prefer with numbers of a reference that nobody asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from workbench import evaluation
from workbench.config import RunConfig
from workbench.data.held_out_split import Splits
from workbench.data.text import prompts
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.preference_pairs import PreferenceSet
from workbench.data.text.token_masking import MlmEncoder
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.models.backbones import Backbone
from workbench.models.exported import ExportedModel
from workbench.models.output_heads import Head
from workbench.planning.counters import Operations
from workbench.planning.step_time import StepWork
from workbench.recipes.preferences import prefer, preference_reference
from workbench.recipes.preferences.prefer import PreferenceRun
from workbench.recipes.preferences.preference_reference import AnswerNumbers
from workbench.recipes.reinforcement import reinforce
from workbench.recipes.reinforcement.reinforce import ReinforceRun
from workbench.recipes.single import token_reference
from workbench.recipes.text import sft
from workbench.recipes.text.sft import TextRun
from workbench.runs.run_directory import Run
from workbench.training import preference_objective
from workbench.training.callbacks import Silent
from workbench.training.reinforcement.rollouts import RolloutRows
from workbench.training.signal import TrainingSignal


class PlannedText(NamedTuple):
    """Tokenizer, form and rows of a run, and what makes a run of them by a configuration like its own."""

    tokenizer: PreTrainedTokenizerBase
    template: ChatEncoder | MlmEncoder
    data: Splits[TokenizedSet]
    """All answers, where they are judged."""
    make: Callable[[RunConfig, Run], TextRun]
    looked: float = 0.0
    """Tokens that a step only reads, for each that it learns from."""
    once: int = 0
    """Tokens that are read before the first step."""


class PlannedPreferences(PreferenceRun):
    """A run whose tensors have no values, so that it tells none."""

    def supervise(self, live: ExportedModel, backbone: Backbone, progress: Callable[[], float]) -> TrainingSignal:
        return super().supervise(live, backbone, progress)._replace(meter=None, look=None)


def prepare(config: RunConfig, run: Run) -> PlannedText:
    """The rows of a run, which is refused where it would fail or teach nothing."""
    if config.recipe == "prefer":
        return _judged(config)
    if config.recipe == "reinforce":
        return _rolled_out(config)
    tokenizer, template, data = sft.prepare(config, run)
    return PlannedText(
        tokenizer, template, data, lambda own, run: TextRun(own, run, Silent(), tokenizer, template, data)
    )


def with_reading(work: StepWork, planned: PlannedText, model: nn.Module, head: Head, rows: TokenizedSet) -> StepWork:
    """The work of a step with the passes that only read, where there are any.

    Args:
        model: Without values, in evaluation mode.
        rows: Some, the operations of which are counted.
    """
    if not (planned.looked or planned.once):
        return work
    with torch.no_grad(), Operations() as operations:
        evaluation.likelihood(model, head, rows)
    forward = operations.count / int(rows.lengths.sum())
    return replace(work, forward=forward, looked=planned.looked * work.tokens, once=planned.once)


def notes(config: RunConfig) -> Iterator[str]:
    """Yield a sentence on what a plan leaves out."""
    if config.recipe == "prefer" and config.prefer.compares:
        reference = token_reference.named(preference_reference.wanted(config), config)
        if reference.source.model.id != config.model.id:
            yield f"The reference, {reference.source.name}, is taken to be as large as the model that trains."
    if config.recipe == "reinforce":
        if (url := config.reinforce.rollouts.url) is not None:
            yield f"Answers are written at {url}, whose memory is its own."
        yield (
            "Writing and rewarding the answers of each step is not counted, in time and memory; each answer is taken "
            "to be as long as it may be."
        )


class PlannedRollouts(ReinforceRun):
    """A run whose answers nobody writes: each is as long as it may be."""

    def supervise(self, live: ExportedModel, backbone: Backbone, progress: Callable[[], float]) -> TrainingSignal:
        section = self.config.reinforce
        rows = RolloutRows(prompts.sampled_prompts(self.data.train, self.config), section)
        read = partial(preference_objective.log_probs, live.model, live.head, temperature=section.temperature)
        return self.signal(rows, read)._replace(meter=None)


def _rolled_out(config: RunConfig) -> PlannedText:
    tokenizer, template, data, _ = reinforce.prepare(config)

    def make(own: RunConfig, run: Run) -> TextRun:
        return PlannedRollouts(own, run, Silent(), tokenizer, template, data, judges=[])

    return PlannedText(tokenizer, template, data, make)


def _judged(config: RunConfig) -> PlannedText:
    tokenizer, template, pairs = prefer.prepare(config)
    splits = pairs.named()
    numbers = {name: _unknown(split) for name, split in splits.items()} if config.prefer.compares else None
    good = pairs.map(lambda split: split.good)

    def make(own: RunConfig, run: Run) -> TextRun:
        return PlannedPreferences(own, run, Silent(), tokenizer, template, good, pairs=pairs, numbers=numbers)

    train = pairs.train
    looked = 0.0 if train.others is None else float(train.others.lengths.sum() / train.lengths.sum())
    once = sum(map(_read, splits.values())) if config.prefer.compares else 0
    answers = pairs.map(lambda split: split.answers)
    return PlannedText(tokenizer, template, answers, make, looked, once)


def _read(rows: PreferenceSet) -> int:
    """Tokens that a reference reads of a set."""
    return int(rows.lengths.sum()) + (0 if rows.others is None else int(rows.others.lengths.sum()))


def _unknown(rows: PreferenceSet) -> AnswerNumbers:
    count = len(rows.answers)
    return AnswerNumbers(np.zeros(count), np.zeros(count), None if rows.others is None else np.zeros(count))
