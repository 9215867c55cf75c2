"""Rows and loss that a model trains with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor, nn

from workbench.data.batching import Examples, MicroBatch
from workbench.losses.label_losses import LabelTap
from workbench.training.reference_losses import ReferenceLosses

Loss = Callable[[MicroBatch, float], Tensor]
"""Summed loss of a micro-batch times a factor, as a scalar with a graph."""


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
    reference: ReferenceLosses | None = None
    """Losses of another model on the rows, where `data.sampling.by=tokens` compares with them."""


@dataclass
class ProgressClock:
    """Share of a run that is done, for a loss that follows a schedule."""

    share: float = 0.0

    def __call__(self) -> float:
        return self.share
