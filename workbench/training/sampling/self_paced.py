"""Self-paced learning: rows open in the order of the losses that the run itself measures (Kumar, Packer and Koller,
NIPS 2010; Jiang et al., AAAI 2015, give the share of open rows a pace of its own, as here).

Legend: N training rows, T rows of a stretch of steps.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from workbench.config import TrainingSections
from workbench.data.batching import Examples, Indices
from workbench.data.row_order import draws_of_rows, step_sizes
from workbench.errors import ConfigError
from workbench.runs.ranks import Ranks
from workbench.training.row_losses import RowLosses
from workbench.training.sampling.sampler import Draw, Sampler

STRETCHES = 16
"""How often in a pass the losses decide anew which rows are open."""


class SelfPaced(Sampler):
    """Draws among the rows of the lowest last loss, a share of all that grows as `data.curriculum` says.

    The first pass has all rows, as without a curriculum, and measures them; the papers begin with weights that were
    fitted to all rows, too. After it, a row comes as often as without a curriculum: only when it is drawn changes.
    Where the open rows have no draws left for the next steps, more are opened.

    Raises:
        ConfigError: The run has no step after its first pass.
    """

    def __init__(self, train: Examples, config: TrainingSections, steps: int | None, ranks: Ranks) -> None:
        super().__init__(train, config, steps, ranks)
        assert steps is not None, "a curriculum with a budget alone is refused"
        if steps <= self.steps_per_epoch:
            raise ConfigError(
                f"data.curriculum.by=self_paced measures all rows in a first pass ({self.steps_per_epoch:,} steps), "
                f"and the run ends with it (after {steps:,} steps).\n"
                "  Write more train.epochs, such as 3, or data.curriculum.by=length."
            )
        self._sizes = step_sizes(len(train), config.batch.size, steps)
        self._stretch = max(1, self.steps_per_epoch // STRETCHES)
        self._loss_N = np.zeros(len(train), dtype=np.float32)
        self._left_N = draws_of_rows(len(train), sum(self._sizes), seed=config.seed) - 1  # after the first pass
        self._row_T: Indices = np.empty(0, dtype=np.int64)
        self._first, self._opened = self.steps_per_epoch, len(train)
        """First step of the present stretch, and rows that are open in it."""

    def rows(self, step: int) -> Indices:
        if step < self.steps_per_epoch:
            return self.evenly.rows(step)
        if self._place(step) >= len(self._row_T):
            self._open(step)
        return self.ahead(step)

    def ahead(self, step: int) -> Indices:
        if step < self.steps_per_epoch:
            return self.evenly.rows(step)
        if step >= len(self._sizes):
            return self._row_T[:0]
        return self._row_T[self._place(step) :][: self._sizes[step]]

    def drawn(self, rows: Indices, losses: RowLosses | None) -> Draw:
        return Draw(rows)

    def metrics(self) -> dict[str, float]:
        return {"open_share": self._opened / len(self.train)}

    def state(self) -> dict[str, Tensor]:
        self._hear()
        return {
            "loss": torch.from_numpy(self._loss_N),
            "left": torch.from_numpy(self._left_N),
            "rows": torch.from_numpy(self._row_T),
            "stretch": torch.tensor([self._first, self._opened]),
        }

    def load(self, state: dict[str, Tensor]) -> None:
        self._loss_N, self._left_N = state["loss"].numpy(), state["left"].numpy()
        self._row_T = state["rows"].numpy()
        self._first, self._opened = (int(each) for each in state["stretch"])
        self._new_losses = []

    def _place(self, step: int) -> int:
        """Rows of the stretch that come before step `step`."""
        return sum(self._sizes[self._first : step])

    def _open(self, step: int) -> None:
        """Draw the rows of the next steps among those that are open by what was measured so far."""
        self._hear()
        curriculum, count, passed = self.config.data.curriculum, len(self.train), self.steps_per_epoch
        progress = (step - passed) / (len(self._sizes) - passed)
        sizes = self._sizes[step : step + self._stretch]
        order_N = np.argsort(self._loss_N * curriculum.direction, kind="stable")
        enough = 1 + int(np.searchsorted(np.cumsum(self._left_N[order_N]), sum(sizes)))
        self._opened = min(count, max(round(curriculum.open_share(progress) * count), enough))
        open_rows = order_N[: self._opened]
        deck = np.repeat(open_rows, self._left_N[open_rows])
        self._row_T = np.random.default_rng([self.config.seed, 11, step]).choice(deck, sum(sizes), replace=False)
        self._left_N = self._left_N - np.bincount(self._row_T, minlength=count)
        self._first = step

    def _hear(self) -> None:
        if (losses := self.new_losses()) is not None:
            self._loss_N[losses.rows] = losses.loss_B
