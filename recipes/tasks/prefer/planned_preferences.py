"""A run of preference pairs as a plan sees it: with numbers of a reference that nobody asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from workbench.config import RunConfig
from workbench.data.text.preference_pairs import PreferenceSet
from workbench.models.backbones import Backbone
from workbench.models.exported import ExportedModel
from workbench.recipes.tasks.prefer import preference_run
from workbench.recipes.tasks.prefer.preference_reference import AnswerNumbers
from workbench.recipes.tasks.prefer.preference_run import PreferenceRun
from workbench.runs.run_directory import Run
from workbench.training.callbacks import Silent
from workbench.training.signal import TrainingSignal


class PlannedPreferences(PreferenceRun):
    """A run whose tensors have no values, so that it tells none."""

    def supervise(self, live: ExportedModel, backbone: Backbone, progress: Callable[[], float]) -> TrainingSignal:
        return super().supervise(live, backbone, progress)._replace(meter=None, look=None)


class Planned(NamedTuple):
    """A run, and what it reads besides the rows of a step; see `DryTask`."""

    single: PlannedPreferences
    looked: float
    once: int


def planned(config: RunConfig, run: Run) -> Planned:
    """The run, and the tokens that it reads without learning from them."""
    tokenizer, template, pairs = preference_run.prepare(config)
    splits = pairs.named()
    numbers = {name: _unknown(split) for name, split in splits.items()} if config.prefer.compares else None
    good = pairs.map(lambda split: split.good)
    single = PlannedPreferences(config, run, Silent(), tokenizer, template, good, pairs=pairs, numbers=numbers)
    train = pairs.train
    looked = 0.0 if train.others is None else float(train.others.lengths.sum() / train.lengths.sum())
    return Planned(single, looked, sum(map(_read, splits.values())) if config.prefer.compares else 0)


def _read(rows: PreferenceSet) -> int:
    """Tokens that a reference reads of a set."""
    return int(rows.lengths.sum()) + (0 if rows.others is None else int(rows.others.lengths.sum()))


def _unknown(rows: PreferenceSet) -> AnswerNumbers:
    count = len(rows.answers)
    return AnswerNumbers(np.zeros(count), np.zeros(count), None if rows.others is None else np.zeros(count))
