"""Rows and loss that a model trains with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from workbench.adapters.method import TrainHook
from workbench.data.batching import Examples, Indices, MicroBatch
from workbench.losses.drawn_labels import LabelDraws
from workbench.losses.label_losses import LabelTap
from workbench.training.cached_gradients import GlobalLoss
from workbench.training.sampling.loss_based import ReferenceLosses
from workbench.training.step_meter import StepMeter

Loss = Callable[[MicroBatch, float], Tensor]
"""Summed loss of a micro-batch times a factor, as a scalar with a graph."""


class LookRows(Protocol):
    """Rows with the numbers of training rows, which a model reads before it learns these."""

    @property
    def lengths(self) -> Indices:
        """Tokens of each."""

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        """The rows `indices`, padded."""


class StepLook(Protocol):
    """Figures of a whole step on which the loss of each of its rows depends, found by a look without gradients."""

    @property
    def rows(self) -> LookRows:
        """Rows that are looked at."""

    def measure(self, batch: MicroBatch) -> Tensor:
        """Sums (k,) over the rows of a micro-batch, float64."""

    def take(self, sums: Tensor) -> None:
        """Use these sums (k,) over all rows of the step, of all processes, in the losses that follow."""


class TrainingSignal(NamedTuple):
    """Rows, loss and auxiliary module that a model trains with."""

    train: Examples
    loss: Loss
    auxiliary: nn.Module | None = None
    """Trains with the model and is not saved with the adapter, such as the projections of a distillation loss."""
    known: bool = True
    """Whether the rows of the next step are known before this one ends; not where the student writes them."""
    settings: Mapping[str, Any] = MappingProxyType({})
    """Settings of the loss on which memory depends and that the run's configuration does not hold, as JSON."""
    tap: LabelTap | None = None
    """Where the losses of single labels can be heard; None where a row has no loss of its own."""
    reads_packed: bool = False
    """Whether the loss finds its positions in rows that are packed into one sequence."""
    meter: StepMeter | None = None
    """Where the loss tells of its rows what stands in metrics.jsonl."""
    look: StepLook | None = None
    """A look at the rows of each step before their losses."""
    whole: GlobalLoss | None = None
    """A loss that compares the rows of a global batch, where it is no sum over them; `loss` then only tries memory."""
    keeps: Mapping[str, TrainHook] = MappingProxyType({})
    """Parts of the rows and the loss that keep a state, by the name of their file in a checkpoint."""
    reference: ReferenceLosses | None = None
    """Losses of another model on the rows, where `data.sampling.by=tokens` compares with them."""
    draws: LabelDraws | None = None
    """Where the loss draws labels from what the model predicts; None where it cannot."""


@dataclass
class ProgressClock:
    """Share of a run that is done, for a loss that follows a schedule."""

    share: float = 0.0

    def __call__(self) -> float:
        return self.share
