"""The seam of tasks: what verbs and recipes over tasks ask of a task, besides its facts.

A task is a folder of `recipes/tasks/`: its `__init__.py` states `TaskFacts` and its own section, without torch; the
module that the facts name has a `TASK`, an instance of the class below. Whoever needs a branch on a task's name has
found a fact or a method that is missing here. `scripts/my_task.py` is a task of a user's own.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from workbench.config import RunConfig, model_heads
from workbench.config.expansions.member_runs import Trial
from workbench.config.model_heads import ModelHead
from workbench.config.task_facts import OverFacts, TaskFacts, register
from workbench.data.batching import MicroBatch, micro_batches
from workbench.data.rows import RawRow
from workbench.errors import ConfigError
from workbench.evaluation.forward_passes import ModelResults
from workbench.models import backbones
from workbench.models.backbones import Backbone, Loader
from workbench.recipes.single.single_run import SingleRun
from workbench.runs.ranks import Ranks
from workbench.runs.run_directory import Run
from workbench.runs.trust import Trust
from workbench.training import capacity, preflight
from workbench.training.callbacks import Callback
from workbench.training.signal import Units

if TYPE_CHECKING:
    import pandas as pd

    from workbench.data.text.quality.survey import SourceRows
    from workbench.evaluation.serving.served_models import ServedModel

__all__ = [
    "DryTask",
    "MembersAtOnce",
    "OutputError",
    "OverFacts",
    "PredictionTable",
    "RowFile",
    "RunOutputs",
    "ScoringOptions",
    "Task",
    "TaskFacts",
    "implementation",
    "main_of",
    "register",
]

Scores = dict[str, Any]
ROWS = 64
"""Held-out rows on which a run is compared with what is made of it."""


class PredictionTable(NamedTuple):
    """Outputs of a run for the rows of a file."""

    table: pd.DataFrame
    """One line a row."""
    left_out: Sequence[str] = ()
    """Rows that could not be read, each with its reason, where `data.on_bad_row` is `skip`."""
    read: Sequence[RawRow] | None = None
    """The row that each line is of, where the file is not one of texts."""
    notes: Sequence[str] = ()
    """Sentences on a file that was written as a sample submission is."""

    @property
    def rows(self) -> int:
        """Rows that were answered."""
        return len(self.table)


class ScoringOptions(NamedTuple):
    """How rows of a finished run are scored or predicted."""

    scoring: ModelResults | None = None
    """Keeps outputs, or shares the rows among processes; None: all rows here, and nothing kept."""
    trust: Trust = Trust()
    """Whether Python code that the run directory names is executed."""
    max_new_tokens: int = 256
    """Longest answer, where the model writes text."""


class OutputError(Protocol):
    """Distance of a model's outputs from those of a run."""

    @property
    def sentence(self) -> str:
        """For a person."""


class RunOutputs(Protocol):
    """Outputs of a run for held-out rows, and the means to compare others with them: merge, export and combine."""

    @property
    def task(self) -> ModelHead:
        """Head of its model."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Tokenizer that the run saved; None where it reads pictures."""

    @property
    def note(self) -> str:
        """Sentence on outputs that a stock model leaves to who reads it; empty where there is none."""

    def settle(self, model: PreTrainedModel) -> PreTrainedModel:
        """Configure a whole model to stop and to pad as the run does."""

    def save(self, model: PreTrainedModel, folder: Path) -> None:
        """Write a whole model into `folder` with what belongs beside it, as a stock one."""

    def error(self, model: nn.Module, backbone: PreTrainedModel) -> OutputError:
        """Distance of a model's outputs from the run's.

        Args:
            model: The same as `backbone`, called like it, or with an adapter around it.
            backbone: Settled, where it is no whole model that was saved so.
        """


class RowFile(NamedTuple):
    """A file that a recipe names, for `workbench data`."""

    title: str
    """Train, Held-out or Test, with the name of the source."""
    data: Any
    """`DataConfig` that reads it as training rows."""
    trains: bool


class DryTask(NamedTuple):
    """A training as a plan carries it out: on tensors that have shapes and no values."""

    single: SingleRun[Any, Any]
    """The run, whose losses need no values."""
    largest: Callable[[Any], object]
    """Scores the largest held-out micro-batch, given the model that trains."""
    assemble: Callable[[Any, nn.Module, Backbone], Any] = lambda own, model, backbone: own.assemble(model, backbone)
    """The model that trains, of a run, an adapted model and the backbone under it."""
    units: bool = False
    """Whether a row is several texts, of which a micro-batch takes some."""
    looked: float = 0.0
    """Tokens that a step only reads, for each that it learns from."""
    once: int = 0
    """Tokens that are read before the first step."""
    read: Callable[[Any], int] = lambda live: 0
    """Reads some held-out rows with the model that trains; returns how many tokens they have."""


class Task(ABC):
    """A task: how its rows are read, its model is trained and scored, and its outputs are written."""

    scores_later: ClassVar[bool] = False
    """Whether the backbone is scored after training, so that the first step comes sooner."""

    @abstractmethod
    def begin(self, config: RunConfig, run: Run, callback: Callback, *, loader: Loader = backbones.load) -> Any:
        """The run of one adapter with its data, which are refused where they would fail or teach nothing.

        Args:
            loader: Loads backbones; a plan has one that reads no weights.

        Returns:
            A `SingleRun`, before a weight is read.
        """

    def main(self, config: RunConfig, run: Run, callback: Callback) -> Scores:
        """Train as `config` says; returns scores before and after, as they stand in scores.json."""
        single = self.begin(config, run, callback)
        single.train(score_later=self.scores_later)
        scores: Scores = single.finish()
        return scores

    @abstractmethod
    def inspect(self, config: RunConfig) -> Any:
        """Findings of `check`: everything that a run does before it reads weights."""

    def head(self, inspection: Any) -> ModelHead:
        """The head of the model that `inspect` looked at."""
        return model_heads.of(inspection.config)

    def require(self, config: RunConfig, data: Any) -> None:
        """Refuse a member of a sweep whose adapter would fail on the data of an inspection or of a run."""
        preflight.require_backbone(config, list(data.named().values()), model_heads.of(config))

    @abstractmethod
    def evaluate(self, run: Path, config: RunConfig, turn: ScoringOptions) -> dict[str, float]:
        """Scores of a finished run on `data.test` where `config` names it, else on the held-out rows."""

    def predict(self, run: Path, source: str, config: RunConfig, turn: ScoringOptions) -> PredictionTable:
        """Outputs of a finished run for every row of a file.

        Raises:
            ConfigError: The task has no such outputs.
        """
        raise ConfigError(f"{run}: recipe {config.recipe} predicts nothing. `workbench evaluate` scores it.")

    @abstractmethod
    def outputs(self, run: Path, config: RunConfig) -> RunOutputs:
        """Outputs of a finished run for some held-out rows."""

    @abstractmethod
    def dry(self, config: RunConfig, run: Run) -> DryTask:
        """The training as a plan sees it."""

    def pooled(self, config: RunConfig, table: pd.DataFrame) -> dict[str, float]:
        """Scores of the rows of all folds together, by their predictions; others are means over the folds.

        Args:
            table: The rows of predictions.parquet of every fold.
        """
        return {}

    def end_bytes(self, config: RunConfig, rows: Any) -> int:
        """Bytes of the host that the end of a run works in, beside the model. `rows`: of training."""
        return 0

    def plan_notes(self, config: RunConfig) -> Sequence[str]:
        """Sentences on what a plan leaves out."""
        return ()

    @abstractmethod
    def survey(self, config: RunConfig, files: Sequence[RowFile]) -> list[SourceRows]:
        """The rows of each file as `workbench data` reports them."""

    def serve(self, run: Path, config: RunConfig, name: str, created: int, *, queue: int) -> ServedModel:
        """The model of a finished run as `workbench serve` answers for it.

        Raises:
            ConfigError: Nothing asks such a run over HTTP.
        """
        raise ConfigError(
            f"{run}: recipe {config.recipe} is not served. `workbench evaluate` and `predict` ask such a run."
        )

    def files(self, config: RunConfig) -> Mapping[str, Mapping[str, str]]:
        """SHA-256 of files that a run reads besides its rows and its backbone, by title and path."""
        return {}


def implementation(config: RunConfig) -> Task:
    """What carries out the task of a configuration, alone or as its recipe has it; imported now."""
    own = config.over.stages if config.over is not None and config.crossvalidates else None
    task: Task = importlib.import_module(own or config.task.module).TASK
    return task


MembersAtOnce = Callable[[RunConfig, Sequence[Trial[RunConfig]], Callback, Ranks], int]
"""How many of the members of a run that are left train at the same time; a verb plans it, which knows every recipe."""


def main_of(config: RunConfig, at_once: MembersAtOnce) -> Callable[[RunConfig, Run, Callback], Scores]:
    """What carries out a recipe: that over tasks, or the task itself."""
    if config.over is None:
        return implementation(config).main
    main = importlib.import_module(config.over.module).main
    return partial(main, at_once=at_once)


def largest_numbers(rows: Units, outputs: Callable[[Any, MicroBatch], object]) -> Callable[[Any], object]:
    """Scores the largest micro-batch of rows with a model that gives each of them one number (`DryTask.largest`)."""
    numbers = np.arange(len(rows.lengths))
    longest = next(micro_batches(numbers, rows.lengths, tokens=capacity.FORWARD_TOKENS))
    worst = rows.batch(longest).to(backbones.device())
    return lambda live: outputs(live, worst)
