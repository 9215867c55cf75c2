"""Steps that take more rows as the measured noise of the gradient grows (McCandlish et al. 2018, arXiv:1812.06162)."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.config import TrainingSections
from workbench.data.batching import Examples, Indices, global_batch
from workbench.runs.ranks import Ranks
from workbench.training.optim.noise_scale import NoiseScale
from workbench.training.row_losses import RowLosses
from workbench.training.sampling.sampler import Draw, Sampler


class GrowingBatch(Sampler):
    """Takes the rows of a run in their usual order, and twice as many in a step once the noise scale has doubled.

    After a step that measured the noise scale S, a step of B rows has min(2 B, `batch.growth`) from then on where S is
    2 B or more. So the batch follows the critical one from below, as section 3.3 of the paper suggests for what grows
    with the loss' fall; it never shrinks, and the learning rate stays. Where S stays below twice `batch.size`, rows are
    those of a run without it. The number of steps is as configured, so that larger steps read more rows.

    What a step takes depends on data, seed, step and the noise scales before it, and all of that is in checkpoints.
    """

    def __init__(self, train: Examples, config: TrainingSections, steps: int | None, ranks: Ranks) -> None:
        super().__init__(train, config, steps, ranks)
        assert config.batch.growth is not None and config.optimizer.noise_scale is not None
        self._most, self._every = config.batch.growth, config.optimizer.noise_scale
        self._size, self._step, self._drawn = config.batch.size, 0, 0
        """Rows of a step now, steps done, and rows drawn in them."""
        self._noise: NoiseScale | None = None

    def hear(self, noise: NoiseScale) -> None:
        self._noise = noise

    def epoch(self, step: int) -> int:
        return self._first(step) // len(self.train)

    def rows(self, step: int) -> Indices:
        return self._from(self._first(step))

    def drawn(self, rows: Indices, losses: RowLosses | None) -> Draw:
        return Draw(rows)

    def metrics(self) -> dict[str, float]:
        return {"next_batch": self._size}

    def rows_done(self, step: int, losses: RowLosses) -> None:
        """Do nothing: losses decide nothing here."""

    def after_step(self, step: int) -> None:
        self._drawn, self._step = self._first(step), step
        noise = None if self._noise is None else self._noise.value
        if (step - 1) % self._every == 0 and noise is not None and noise >= 2 * self._size:
            self._size = min(2 * self._size, self._most)

    def state(self) -> dict[str, Tensor]:
        return {"growth": torch.tensor([self._size, self._step, self._drawn])}

    def load(self, state: dict[str, Tensor]) -> None:
        self._size, self._step, self._drawn = state["growth"].tolist()

    def _first(self, step: int) -> int:
        """Rows that are drawn before the present step, or the next."""
        return self._drawn if step == self._step else self._drawn + len(self._from(self._drawn))

    def _from(self, drawn: int) -> Indices:
        """The next rows; the last step of a pass takes what is left of it."""
        count = len(self.train)
        epoch, start = divmod(drawn, count)
        draws = global_batch(epoch, rows=count, size=count, seed=self.config.seed)[start : start + self._size]
        return self.train.sample(draws, epoch=epoch)
