"""The choice of an adapter's method before the first step, by data: which weights train, or from where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from workbench.config import TrainingSections
from workbench.data.batching import Indices, global_batch
from workbench.runs.ranks import Ranks
from workbench.training.signal import TrainingSignal


class MethodChoice:
    """The choice of a method for one training: made once, the same in every process, and kept in checkpoints.

    It depends on data, seed and backbone alone: gradients are those of single rows, without dropout, at the start.
    """

    def __init__(
        self, model: nn.Module, config: TrainingSections, signal: TrainingSignal, *, device: torch.device, ranks: Ranks
    ) -> None:
        self._model: Any = model
        self._method, self._seed = config.adapter, config.seed
        self._signal, self._device, self._ranks = signal, device, ranks
        assert not self._method.looks or (signal.whole is None and signal.look is None), "single rows have no loss"

    @property
    def hooks(self) -> dict[str, MethodChoice]:
        """Itself where anything is chosen, by the name of its file in a checkpoint."""
        return {"choice": self} if self.state() else {}

    @property
    def rows(self) -> Indices:
        """Training rows that are looked at: the first that a run of this seed would draw, and that carry loss."""
        train = self._signal.train
        if not (count := min(self._method.looks, len(train))):
            return np.arange(0)
        draws = global_batch(0, rows=len(train), size=count, seed=self._seed)
        rows = np.unique(train.sample(draws, epoch=0))
        return rows[train.supervised[rows] > 0]

    def make(self, rows: Indices | None = None) -> None:
        """Look at these rows, or at all that there are to look at, and choose."""
        if not self._method.looks:
            return
        looked = self.rows if rows is None else rows
        training = self._model.training
        self._model.eval()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            self._method.choose(self._model, self._losses(looked))
        self._model.train(training)
        self.load(self._ranks.agreed({name: each.cpu() for name, each in self.state().items()}))

    @torch.no_grad()
    def set_starts(self, *values: Mapping[str, Tensor]) -> None:
        """Copy where parameters begin, if that was chosen, into values by the parameters' names."""
        for name, start in self.state().items():
            for each in values:
                if name in each:
                    each[name].copy_(start)

    def _losses(self, rows: Indices) -> Iterator[Tensor]:
        for row in rows:
            yield self._signal.loss(self._signal.train.batch(row[None]).to(self._device), 1.0)

    def on_gradients(self) -> None:
        """Do nothing."""

    def after_step(self, step: int) -> None:
        """Do nothing."""

    def state(self) -> dict[str, Tensor]:
        """The choice, for a checkpoint."""
        return self._method.chosen(self._model)

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        """Choose the same as before."""
        for name, own in self.state().items():
            own.copy_(state[name])
