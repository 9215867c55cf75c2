"""Rows of a step that are chosen out of a larger pool, whose losses a forward pass measures.

Legend: N training rows, M rows of the pool, B rows of a step.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import torch
from torch import Tensor

from workbench.config import TrainingSections
from workbench.data.batching import Examples, Indices, Weights
from workbench.runs.ranks import Ranks
from workbench.training.row_losses import RowLosses
from workbench.training.sampling.sampler import Draw, Floats, Sampler, by_row

MEMORY = 0.9
"""Share of the old value in the running mean of the gain, as in the paper's code."""


class PoolSampler(Sampler):
    """Chooses the rows of a step out of `pool` times as many.

    The pool of a step begins with the rows that it would have without a sampler, and goes on with those of the steps
    after it, so that each row is looked at equally often.
    """

    def __init__(self, train: Examples, config: TrainingSections, steps: int | None, ranks: Ranks) -> None:
        super().__init__(train, config, steps, ranks)
        self._step = 0
        """The present step."""

    @property
    @abstractmethod
    def looks(self) -> bool:
        """Whether the present step chooses."""

    def rows(self, step: int) -> Indices:
        self._step = step
        if not self.looks:
            return self.evenly.rows(step)
        steps = range(step, step + self.section.pool)
        return np.unique(np.concatenate([self.evenly.rows(each) for each in steps]))

    def ahead(self, step: int) -> Indices:
        return np.empty(0, dtype=np.int64) if self.looks else self.evenly.rows(step)

    @property
    def size(self) -> int:
        """B: rows of the present step."""
        return len(self.evenly.rows(self._step))

    @property
    def generator(self) -> np.random.Generator:
        """Random numbers of the present step."""
        return np.random.default_rng([self.config.seed, 8, self._step])


class ImportanceSampling(PoolSampler):
    """Draws rows in proportion to a bound of their gradients' norms (Katharopoulos and Fleuret, ICML 2018,
    arXiv:1803.00942).

    A row's gradient is at most a constant times the sum of 1 - p(label) over its labels: that long is the gradient of a
    cross-entropy by its logits, up to the factor sqrt(2). The weights make the mean gradient, over the tokens of the
    pool, that of all its rows in expectation. Numbers, which have a squared error, are drawn by their error's size.

    It begins when the gain, the factor by which an even batch would have to grow for as small a variance, pays for the
    forward pass over the pool, and ends when it does so no longer. The paper counts a backward pass as two forward
    passes; over frozen weights it is one here. The paper's gain is the root of this one, as if the variance of a mean
    fell with the square of the batch, and so its gate opens later than it pays.
    """

    def __init__(self, train: Examples, config: TrainingSections, steps: int | None, ranks: Ranks) -> None:
        super().__init__(train, config, steps, ranks)
        passes = 3 if config.adapter.method == "full" else 2
        self.pays = (self.section.pool + passes) / passes
        """Gain from which on a step with a pool is worth its time."""
        self._gain = 0.0

    @property
    def looks(self) -> bool:
        return self._gain > self.pays

    def rows(self, step: int) -> Indices:
        if (losses := self.new_losses()) is not None and not self.looks:
            self._learn(self._norms(losses))
        return super().rows(step)

    def drawn(self, rows: Indices, losses: RowLosses | None) -> Draw:
        if losses is None:
            return Draw(rows)
        losses = by_row([losses])
        norm_M = self._norms(losses)
        chance_M = norm_M / norm_M.sum()
        times_M = self.generator.multinomial(self.size, chance_M)
        weight_N = np.zeros(len(self.train))
        weight_N[losses.rows] = importance_weights(times_M, chance_M, self.train.supervised[losses.rows])
        self._learn(norm_M)
        return Draw(losses.rows[times_M > 0], weight_N)

    def metrics(self) -> dict[str, float]:
        return {"sampling_gain": self._gain}

    def state(self) -> dict[str, Tensor]:
        if (losses := self.new_losses()) is not None and not self.looks:
            self._learn(self._norms(losses))
        return {"gain": torch.tensor([self._gain], dtype=torch.float64)}

    def load(self, state: dict[str, Tensor]) -> None:
        self._gain, self._new_losses = float(state["gain"]), []

    def _norms(self, losses: RowLosses) -> Floats:
        """Bounds (M,) of the gradients of rows, up to a common factor; never 0, so that each row can be drawn."""
        if self.config.recipe in ("classify", "crossval") and self.config.classes.kind == "number":
            error_M = np.sqrt(losses.loss_B.astype(np.float64))
        else:
            error_M = 1 - losses.probability_B.astype(np.float64)
        weight_M = self.train.supervised[losses.rows].astype(np.float64)
        norm_M: Floats = np.maximum(error_M, 1e-6) * weight_M
        return norm_M

    def _learn(self, norm_M: Floats) -> None:
        self._gain = MEMORY * self._gain + (1 - MEMORY) * gain(norm_M)


def importance_weights(times_M: Indices, chance_M: Floats, supervised_M: Weights) -> Floats:
    """Weights (M,) with which the mean gradient over the tokens of the rows drawn is, in expectation, the pool's.

    Args:
        times_M: How often each row was drawn; it is computed once.
        chance_M: Its chance in a draw.
        supervised_M: Its tokens that carry loss, or the weight of its label.
    """
    drawn_M = times_M / (times_M.sum() * chance_M)
    weight_M: Floats = drawn_M * (supervised_M[times_M > 0].sum() / supervised_M.sum())
    return weight_M


def gain(norm_M: Floats) -> float:
    """Factor by which an even batch would have to grow at least for the variance of drawing in proportion to `norm_M`.

    The second moments of the two are (mean of norms^2) / B and (mean of norms)^2 / B; the square of the mean gradient,
    which the variance lacks of both, makes the factor larger. It is the square of the paper's tau.
    """
    share_M = norm_M / norm_M.sum()
    return float(len(share_M) * (share_M**2).sum())


class SelectiveBackprop(PoolSampler):
    """Draws rows of high loss more often, without weights (Jiang et al. 2019, arXiv:1910.00762): biased towards them.

    A row is drawn, once at most, with a chance in proportion to a power of the share of rows whose loss is lower. The
    paper compares with the losses of the last rows and computes until a batch is full; here it is the pool's losses,
    so that each step has as many rows as without it. After `until` of the run rows are drawn evenly.
    """

    @property
    def looks(self) -> bool:
        return self.share(self._step) < self.section.until

    def drawn(self, rows: Indices, losses: RowLosses | None) -> Draw:
        if losses is None:
            return Draw(rows)
        losses = by_row([losses])
        count = len(losses.rows)
        rank_M = np.empty(count)
        rank_M[np.argsort(losses.loss_B, kind="stable")] = np.arange(1, count + 1)
        key_M = self.section.power * np.log(rank_M / count) + self.generator.gumbel(size=count)
        return Draw(np.sort(losses.rows[np.argsort(-key_M)[: self.size]]))

    def state(self) -> dict[str, Tensor]:
        self.new_losses()
        return {}

    def load(self, state: dict[str, Tensor]) -> None:
        self._new_losses = []
