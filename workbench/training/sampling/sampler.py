"""Base of samplers: rows of each step that depend on losses which the training measures.

Legend: N training rows, B rows of a step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from workbench.config import TrainingSections
from workbench.data.batching import Examples, Indices, MicroBatch
from workbench.data.row_order import RowOrder
from workbench.runs.ranks import Ranks
from workbench.training.checkpoints import Checkpointed
from workbench.training.optim.noise_scale import NoiseScale
from workbench.training.row_losses import RowLosses, joined

Floats = npt.NDArray[np.float64]


class Draw(NamedTuple):
    """Rows that a step trains on, with their weights."""

    rows: Indices
    weight_N: Floats | None = None
    """Factor of the loss of each training row; None: 1 everywhere."""
    token_weights: Mapping[int, Floats] | None = None
    """Factors of the supervised tokens of each of the rows; None: 1 everywhere."""

    def weighed(self, batch: MicroBatch, rows: Indices) -> MicroBatch:
        """A micro-batch of some of the rows, whose labels have their weights."""
        if self.weight_N is not None:
            return batch.weighted(self.weight_N[rows])
        if self.token_weights is not None:
            weight_N = torch.from_numpy(np.concatenate([self.token_weights[int(row)] for row in rows])).float()
            return batch.with_factors(weight_N)
        return batch


class Sampler(Checkpointed, ABC):
    """Chooses the rows of each step from losses of rows; its state is in checkpoints.

    The choice is a function of rows, settings, seed, step and losses: the same in all processes and for any
    micro-batches.

    Args:
        steps: Optimizer steps of the run; None where a budget alone ends it.
    """

    def __init__(self, train: Examples, config: TrainingSections, steps: int | None, ranks: Ranks) -> None:
        self.train, self.config, self.steps, self.ranks = train, config, steps, ranks
        self.section = config.data.sampling
        self.evenly = RowOrder(train, config, steps)
        """The rows without a sampler."""
        self._new_losses: list[RowLosses] = []

    def hear(self, noise: NoiseScale) -> None:
        """Receive the gradient noise scale of the training, which is updated during the run."""

    @property
    def looks(self) -> bool:
        """Whether the present step needs the losses of candidate rows before it chooses."""
        return False

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of a pass over all rows."""
        return self.evenly.steps_per_epoch

    def epoch(self, step: int) -> int:
        """The pass over the rows that step `step` (from 0) belongs to; it must be the present or the next step."""
        return self.evenly.epoch(step)

    @abstractmethod
    def rows(self, step: int) -> Indices:
        """Rows of step `step` (from 0), or where it `looks` the candidates. All processes ask at once."""

    def ahead(self, step: int) -> Indices:
        """The same for the step after the present one, as far as it is known already; else none."""
        return self.rows(step)

    @abstractmethod
    def drawn(self, rows: Indices, losses: RowLosses | None) -> Draw:
        """The rows on which the present step trains.

        Args:
            rows: What `rows` returned.
            losses: Losses of these, in any order, where the sampler `looks`; else None.
        """

    def metrics(self) -> dict[str, float]:
        """Figures on the present step, for metrics.jsonl."""
        return {}

    def rows_done(self, step: int, losses: RowLosses) -> None:
        """These rows of this process were trained on in step `step` (from 1)."""
        self._new_losses.append(losses)

    def new_losses(self) -> RowLosses | None:
        """Losses of the rows of all processes since the last call, by row; every process must call it."""
        losses = [each for part in self.ranks.gathered(self._new_losses) for each in part]
        self._new_losses = []
        return by_row(losses) if losses else None

    def share(self, step: int) -> float:
        """Share of the run that is done before step `step`; 0 where a budget alone ends it."""
        return step / self.steps if self.steps else 0.0


def by_row(parts: Sequence[RowLosses]) -> RowLosses:
    """Losses of several micro-batches or processes, in the order of their rows."""
    whole = joined(parts)
    order = np.argsort(whole.rows, kind="stable")
    labels = tuple(whole.label_losses[place] for place in order) if whole.label_losses else ()
    return RowLosses(whole.rows[order], whole.loss_B[order], whole.probability_B[order], whole.right_B[order], labels)
