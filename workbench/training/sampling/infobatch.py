"""InfoBatch: passes that leave out a part of the rows of low loss, without a bias (Qin et al., ICLR 2024,
arXiv:2303.04947).

Legend: N training rows, P rows of a pass.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from workbench.config import TrainingSections
from workbench.data.batching import Examples, Indices
from workbench.errors import ConfigError
from workbench.runs.ranks import Ranks
from workbench.training.row_losses import RowLosses
from workbench.training.sampling.sampler import Draw, Floats, Sampler


class InfoBatch(Sampler):
    """Leaves out `prune` of the rows whose last loss is below the mean, chosen anew in each pass.

    Those that are drawn for them count more (Horvitz-Thompson), so that the mean gradient of a pass, over the tokens of
    all rows, is that of all rows in expectation. A row's loss is the mean of its tokens, and stands until the row is
    drawn again. The first pass has all rows, and so have those after `until` of the run, where a pass that lacks rows
    ends at once.

    The paper keeps the number of passes, and with it takes fewer steps; here the number of steps stays, and a step's
    gradient is a mean over its tokens, which the paper scales up by the rows that are missing.

    Raises:
        ConfigError: No pass of the run could leave a row out.
    """

    def __init__(self, train: Examples, config: TrainingSections, steps: int | None, ranks: Ranks) -> None:
        super().__init__(train, config, steps, ranks)
        if steps is not None and self.steps_per_epoch >= steps * self.section.until:
            raise ConfigError(
                f"data.sampling.by=infobatch leaves rows out after the first pass ({self.steps_per_epoch:,} steps) and "
                f"before {self.section.until:.0%} of the run (of {steps:,} steps), so never.\n"
                "  Write more train.epochs, such as 3, or leave data.sampling out."
            )
        self._loss_N = np.zeros(len(train), dtype=np.float32)
        self._number, self._first = -1, 0
        """Number of the pass, and its first step."""
        self._row_P: Indices = np.empty(0, dtype=np.int64)
        self._weight_N: Floats = np.ones(len(train))

    def epoch(self, step: int) -> int:
        return max(self._number, 0)

    def rows(self, step: int) -> Indices:
        if self._place(step) >= len(self._row_P) or self._too_late(step):
            self._begin_pass(step)
        return self.ahead(step)

    def ahead(self, step: int) -> Indices:
        return (
            np.empty(0, dtype=np.int64)
            if self._too_late(step)
            else self._row_P[self._place(step) :][: self.config.batch.size]
        )

    def drawn(self, rows: Indices, losses: RowLosses | None) -> Draw:
        return Draw(rows, None if self._complete else self._weight_N)

    def metrics(self) -> dict[str, float]:
        return {"drawn_share": len(self._row_P) / len(self.train)}

    def state(self) -> dict[str, Tensor]:
        self._hear()
        return {
            "loss": torch.from_numpy(self._loss_N),
            "pass": torch.tensor([self._number, self._first]),
            "rows": torch.from_numpy(self._row_P),
            "weight": torch.from_numpy(self._weight_N),
        }

    def load(self, state: dict[str, Tensor]) -> None:
        self._loss_N, self._row_P = state["loss"].numpy(), state["rows"].numpy()
        self._weight_N = state["weight"].numpy()
        self._number, self._first = (int(each) for each in state["pass"])
        self._new_losses = []

    @property
    def _complete(self) -> bool:
        """Whether the pass has all rows."""
        return len(self._row_P) == len(self.train)

    def _too_late(self, step: int) -> bool:
        """Whether the pass lacks rows where all are to be drawn."""
        return not self._complete and self.share(step) >= self.section.until

    def _place(self, step: int) -> int:
        """Rows of the pass that come before step `step`."""
        return (step - self._first) * self.config.batch.size

    def _begin_pass(self, step: int) -> None:
        self._hear()
        self._number, self._first = self._number + 1, step
        count, seed = len(self.train), self.config.seed
        order_N = np.random.default_rng([seed, self._number]).permutation(count)  # as without a sampler
        if self._number == 0 or self.share(step) >= self.section.until:
            self._row_P, self._weight_N = order_N, np.ones(count)
            return
        low = np.flatnonzero(self._loss_N < self._loss_N.mean(dtype=np.float64))
        self._weight_N = pruning_weights(count, low, self.section.prune, seed=[seed, 7, self._number])
        self._row_P = order_N[self._weight_N[order_N] > 0]
        # A step's gradient is a mean over its own tokens: of a pass that lacks tokens, it would be that of its rows.
        supervised = self.train.supervised
        self._weight_N = self._weight_N * (supervised[self._row_P].sum() / supervised.sum())

    def _hear(self) -> None:
        if (losses := self.new_losses()) is not None:
            self._loss_N[losses.rows] = losses.loss_B


def pruning_weights(count: int, low: Indices, prune: float, *, seed: list[int]) -> Floats:
    """Weight of each of `count` rows (N,): 0 for `prune` of the rows `low`, so much more for the others of these.

    In expectation every weight is 1. At least one of `low` is kept, as without it the others could not stand for it.
    Each row has a random number of its own, so that a row more or less in `low` changes little of what is kept.
    """
    weight_N = np.ones(count)
    if len(low):
        kept = max(1, round((1 - prune) * len(low)))
        number_N = np.random.default_rng(seed).random(count)
        weight_N[low] = 0
        weight_N[low[np.argsort(number_N[low])[:kept]]] = len(low) / kept
    return weight_N
