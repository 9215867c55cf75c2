"""The rows and the loss that a model trains with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor, nn

from workbench.data.batching import Examples, MicroBatch

Loss = Callable[[MicroBatch, float], Tensor]
"""Summed loss of a micro-batch times a factor, as a scalar with a graph."""


class TrainingSignal(NamedTuple):
    """Rows, loss and hooks that a model trains with."""

    train: Examples
    loss: Loss
    beside: nn.Module | None = None
    """What trains with the model and is not shipped, such as projections that the loss compares through."""
    known: bool = True
    """Whether the rows of a step are known before the step before it is done."""
    settings: Mapping[str, Any] = MappingProxyType({})
    """Settings of the loss that the run's configuration does not hold and memory depends on, as JSON."""


@dataclass
class ProgressClock:
    """Share of a run that is done, for a loss that follows a schedule."""

    share: float = 0.0

    def __call__(self) -> float:
        return self.share
