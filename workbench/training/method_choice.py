"""Data-driven initialisation: what an adapter's method decides from gradients of rows before the first step.

It decides which weights train, or from which values: see `Method.choose`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from workbench.adapters.method import TrainHook
from workbench.config import TrainingSections
from workbench.data.batching import Indices, global_batch
from workbench.runs.ranks import Ranks
from workbench.training.checkpoints import Checkpointed
from workbench.training.signal import TrainingSignal


class MethodChoice(Checkpointed):
    """The decision of a method for one training: made once, the same in every process, and kept in checkpoints.

    It depends only on data, seed and backbone: gradients are of single rows, without dropout, before the first step.
    """

    def __init__(
        self, model: nn.Module, config: TrainingSections, signal: TrainingSignal, *, device: torch.device, ranks: Ranks
    ) -> None:
        self._model: Any = model
        self._method, self._seed = config.adapter, config.seed
        self._signal, self._device, self._ranks = signal, device, ranks
        assert not self._method.looks or (signal.whole is None and signal.look is None), "single rows have no loss"

    @property
    def hooks(self) -> dict[str, TrainHook]:
        """Itself where anything is decided, by the name of its file in a checkpoint."""
        return {"choice": self} if self.state() else {}

    @property
    def rows(self) -> Indices:
        """The training rows whose gradients are read: the first of a run with this seed that carry loss."""
        train = self._signal.train
        if not (count := min(self._method.looks, len(train))):
            return np.arange(0)
        draws = global_batch(0, rows=len(train), size=count, seed=self._seed)
        rows = np.unique(train.sample(draws, epoch=0))
        return rows[train.supervised[rows] > 0]

    def make(self, rows: Indices | None = None) -> None:
        """Decide from these rows; None: from `self.rows`."""
        if not self._method.looks:
            return
        looked = self.rows if rows is None else rows
        training = self._model.training
        self._model.eval()
        batches = (self._signal.train.batch(row[None]).to(self._device) for row in looked)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            self._method.choose(self._model, (self._signal.loss(batch, 1.0) for batch in batches))
        self._model.train(training)
        self.load(self._ranks.agreed({name: each.cpu() for name, each in self.state().items()}))

    def state(self) -> dict[str, Tensor]:
        """The decision, for a checkpoint."""
        return self._method.chosen(self._model)

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        """Restore the decision."""
        for name, own in self.state().items():
            own.copy_(state[name])
