"""Rows and loss that a model trains with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from workbench.adapters.method import TrainHook
from workbench.data.batching import Examples, Indices, MicroBatch
from workbench.losses.label_losses import LabelDraws, LabelTap
from workbench.training.sampling.loss_based import ReferenceLosses
from workbench.training.step_metrics import StepMeter

Loss = Callable[[MicroBatch, float], Tensor]
"""Summed loss of a micro-batch times a factor, as a scalar with a graph."""


class Units(Protocol):
    """Sequences that a model computes one by one, such as the texts of a row that has several."""

    @property
    def lengths(self) -> Indices:
        """Tokens of each."""

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        """The units `indices`, padded."""


Terms = Callable[[], Iterator[Callable[[Tensor], Tensor]]]
"""Functions from the outputs (N, D) of a batch's units to scalars whose sum is the mean loss of its rows."""


class BatchLoss(NamedTuple):
    """The loss of the rows of a global batch."""

    units: Units
    numbers: Indices
    """Units (N,) of its rows, each once, ascending."""
    terms: Terms


class GlobalLoss(Protocol):
    """A loss that compares the rows of a global batch with each other."""

    def of(self, seen: Examples, rows: Indices) -> tuple[Units, Indices, Terms]:
        """The loss of the rows `rows`, as a BatchLoss."""

    def outputs(self, batch: MicroBatch) -> Tensor:
        """The model's outputs (U, D) float32 for the units of a micro-batch."""


class StepLook(Protocol):
    """Figures of a whole step on which the loss of each of its rows depends, found by a pass without gradients."""

    @property
    def rows(self) -> Units:
        """The rows that are read, by the numbers of training rows."""

    def measure(self, batch: MicroBatch) -> Tensor:
        """Sums (k,) over the rows of a micro-batch, float64."""

    def take(self, sums: Tensor) -> None:
        """Use these sums (k,) over all rows of the step, of all processes, in the losses that follow."""


class TrainingSignal(NamedTuple):
    """Rows, loss and auxiliary module that a model trains with."""

    train: Examples
    loss: Loss
    auxiliary: nn.Module | None = None
    """Trains with the model but is not saved with the adapter, such as the projections of a distillation loss."""
    known: bool = True
    """Whether the rows of the next step are known before this one ends; not where the model writes them."""
    settings: Mapping[str, Any] = MappingProxyType({})
    """Settings of the loss on which memory depends and which are not in the run's configuration, as JSON."""
    tap: LabelTap | None = None
    """Reports the losses of single labels; None where a row has no loss of its own."""
    reads_packed: bool = False
    """Whether the loss works on rows that are packed into one sequence."""
    meter: StepMeter | None = None
    """Receives figures of the loss for metrics.jsonl."""
    look: StepLook | None = None
    """A pass over the rows of each step before their losses."""
    whole: GlobalLoss | None = None
    """A loss that compares the rows of a global batch; `loss` then only measures memory."""
    keeps: Mapping[str, TrainHook] = MappingProxyType({})
    """Parts of the rows and the loss that have a state, by the name of their file in a checkpoint."""
    reference: ReferenceLosses | None = None
    """Losses of another model on the rows, where `data.sampling.by=tokens` compares with them."""
    draws: LabelDraws | None = None
    """Samples labels from the model's predictions; None where the loss cannot."""


@dataclass
class ProgressClock:
    """Share of a run that is done, for a loss that follows a schedule."""

    share: float = 0.0

    def __call__(self) -> float:
        return self.share
