"""Sampling by loss: rows and tokens that a step trains on, or weighs, by losses that the training measures.

Legend: N training rows, P rows of a pass, M rows of a pool, B rows of a step, N supervised tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workbench.config import TrainingSections
from workbench.data.batching import Examples, Indices, Weights
from workbench.errors import ConfigError
from workbench.runs.ranks import Ranks
from workbench.training.row_losses import Floats32, RowLosses
from workbench.training.sampling.sampler import Draw, Floats, Sampler, by_row


class InfoBatch(Sampler):
    """`infobatch` (Qin et al., ICLR 2024, arXiv:2303.04947): passes that leave out rows of low loss, without bias.

    Each pass leaves out `prune` of the rows whose last loss is below the mean; the remaining ones of these count more
    (Horvitz-Thompson), so that the mean gradient of a pass, over the tokens of all rows, is unbiased. A row's loss is
    the mean over its tokens when it was last trained on. The first pass has all rows, and so have those after `until`
    of the run, where an incomplete pass ends at once.

    The paper keeps the number of passes and so takes fewer steps; here the number of steps stays, and a step's gradient
    is a mean over its tokens, which the paper scales up by the rows that are missing.

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
        """Whether the pass is incomplete at a step that is for complete passes."""
        return not self._complete and self.share(step) >= self.section.until

    def _place(self, step: int) -> int:
        """Number of the pass's rows before step `step`."""
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
    """Weight of each of `count` rows (N,): 0 for `prune` of the rows `low`, and accordingly more for the rest of these.

    In expectation every weight is 1. At least one row of `low` is kept. Each row has a random number of its own, so
    that one row more or less in `low` changes little of what is kept.
    """
    weight_N = np.ones(count)
    if len(low):
        kept = max(1, round((1 - prune) * len(low)))
        number_N = np.random.default_rng(seed).random(count)
        weight_N[low] = 0
        weight_N[low[np.argsort(number_N[low])[:kept]]] = len(low) / kept
    return weight_N


MEMORY = 0.9
"""Share of the old value in the running mean of the gain, as in the paper's code."""


class PoolSampler(Sampler):
    """Base of samplers that choose the rows of a step from a pool of `pool` times as many, whose losses are measured.

    The pool of a step has the rows that it would have without a sampler, and those of the steps after it, so that each
    row is a candidate equally often.
    """

    def __init__(self, train: Examples, config: TrainingSections, steps: int | None, ranks: Ranks) -> None:
        super().__init__(train, config, steps, ranks)
        self._step = 0  # the present one

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
        """Random numbers for the present step."""
        return np.random.default_rng([self.config.seed, 8, self._step])


class ImportanceSampling(PoolSampler):
    """`importance`: samples rows by a bound of their gradient norms (Katharopoulos and Fleuret 2018, arXiv:1803.00942).

    A row's gradient is at most a constant times the sum of 1 - p(label) over its labels: the norm of a cross-entropy's
    gradient by its logits, up to the factor sqrt(2). The weights make the mean gradient over the pool's tokens
    unbiased. Rows with a squared error (numbers) are sampled by the size of their error.

    Steps have a pool while the gain, the factor by which a uniform batch would have to grow for as small a variance,
    pays for the forward pass over the pool. The paper counts a backward pass as two forward passes; over frozen weights
    it is one here. The paper's gain is the root of this one, as if the variance of a mean fell with the square of the
    batch, so its pool starts later than it pays.
    """

    def __init__(self, train: Examples, config: TrainingSections, steps: int | None, ranks: Ranks) -> None:
        super().__init__(train, config, steps, ranks)
        passes = 3 if config.adapter.method == "full" else 2
        self.pays = (self.section.pool + passes) / passes
        """Gain from which a step with a pool is worth its time."""
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
        if self.config.task.labelled and self.config.classes.kind == "number":
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
        chance_M: Its probability in a draw.
        supervised_M: Its tokens that carry loss, or the weight of its label.
    """
    drawn_M = times_M / (times_M.sum() * chance_M)
    weight_M: Floats = drawn_M * (supervised_M[times_M > 0].sum() / supervised_M.sum())
    return weight_M


def gain(norm_M: Floats) -> float:
    """Least factor by which a uniform batch would have to grow for the variance of sampling in proportion to `norm_M`.

    The second moments of the two are (mean of norms^2) / B and (mean of norms)^2 / B; the square of the mean gradient,
    which the variance lacks of both, makes the factor larger. It is the square of the paper's tau.
    """
    share_M = norm_M / norm_M.sum()
    return float(len(share_M) * (share_M**2).sum())


class SelectiveBackprop(PoolSampler):
    """`selective`: samples rows of high loss more often, without weights (Jiang et al. 2019, arXiv:1910.00762); biased.

    A row is chosen, at most once, with a chance in proportion to a power of the share of rows whose loss is lower. The
    paper compares with the losses of recent rows and computes until a batch is full; here the pool is compared, so that
    each step has as many rows as without a sampler. After `until` of the run rows are uniform.
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


PART = 2**20
"""Tokens in one file of reference losses: 4 MiB."""


def reference_parts(count_N: Indices) -> list[tuple[int, int]]:
    """First row of each file, and the one after its last.

    Args:
        count_N: Supervised tokens of each row.
    """
    part_N = (np.cumsum(count_N) - 1) // PART
    starts = [0, *(np.flatnonzero(np.diff(part_N)) + 1).tolist(), len(count_N)]
    return list(pairwise(starts))


def reference_path(folder: Path, part: int) -> Path:
    """File with a part of the reference losses."""
    return folder / f"{part:05d}.npy"


class ReferenceLosses:
    """Losses of a reference model on every supervised token of the training rows, memory-mapped.

    Args:
        folder: Holds all files.
        count_N: Supervised tokens of each row.
    """

    def __init__(self, folder: Path, count_N: Indices) -> None:
        self._folder, self._counts = folder, count_N

    def __getitem__(self, row: int) -> Floats32:
        """Losses of a row's supervised tokens, in nats, in their order."""
        part = int(np.searchsorted(self._firsts, row, side="right")) - 1
        start = self._ends[row] - self._counts[row] - (self._ends[self._firsts[part] - 1] if part else 0)
        losses: Floats32 = np.asarray(self._parts[part][start : start + self._counts[row]])
        return losses

    @cached_property
    def _ends(self) -> Indices:
        ends: Indices = np.cumsum(self._counts)
        return ends

    @cached_property
    def _firsts(self) -> Indices:
        return np.asarray([first for first, _ in reference_parts(self._counts)])

    @cached_property
    def _parts(self) -> Sequence[npt.NDArray[np.float32]]:
        return [np.load(reference_path(self._folder, part), mmap_mode="r") for part in range(len(self._firsts))]


Mask: TypeAlias = npt.NDArray[np.bool_]

STEP = 2**-10
"""Resolution of excess losses, in nats: smaller differences are rounding of a forward pass."""


class Weighing(Sampler):
    """Base of samplers that keep the rows of a step and weigh them by their losses, measured before the step.

    The whole global batch is measured, so that micro-batches and processes change nothing. No state outlasts a step.
    """

    @property
    def looks(self) -> bool:
        return True

    def rows(self, step: int) -> Indices:
        self._step = step
        return self.evenly.rows(step)

    def ahead(self, step: int) -> Indices:
        return self.evenly.rows(step)

    def rows_done(self, step: int, losses: RowLosses) -> None:
        """Ignore them: the next step measures its own."""

    def state(self) -> dict[str, Tensor]:
        return {}

    def load(self, state: dict[str, Tensor]) -> None:
        """There is no state."""


class Tilted(Weighing):
    """`tilted`: a step's tilted loss in the place of its mean (TERM, Li et al., ICLR 2021, arXiv:2007.01162); biased.

    It is log(mean over the tokens of exp(tilt * loss of their row)) / tilt, whose gradient is the mean of the rows'
    gradients with weights in proportion to exp(tilt * loss), whose mean over the tokens is 1. Towards an infinite tilt
    only the row with the highest loss counts, as in online hard example mining (Shrivastava et al. 2016).
    """

    def drawn(self, rows: Indices, losses: RowLosses | None) -> Draw:
        assert losses is not None
        losses = by_row([losses])
        weight_N = np.zeros(len(self.train.lengths))
        supervised_B = self.train.supervised[losses.rows]
        weight_N[losses.rows] = tilted_weights(losses.loss_B, supervised_B, self.section.tilt)
        self._largest = float(weight_N[losses.rows].max())
        return Draw(rows, weight_N)

    def metrics(self) -> dict[str, float]:
        return {"largest_weight": self._largest}


def tilted_weights(loss_B: Floats32, supervised_B: Weights, tilt: float) -> Floats:
    """Weight (B,) of each row, in proportion to exp(tilt * loss); their mean over the tokens is 1.

    Args:
        loss_B: Mean loss of the row's tokens.
        supervised_B: Its tokens, or the weight of its label.
    """
    exponent_B = tilt * loss_B.astype(np.float64)
    weight_B = np.exp(exponent_B - exponent_B.max())
    mean_1: Floats = weight_B / (weight_B @ supervised_B / supervised_B.sum())
    return mean_1


class TokenSelection(Weighing):
    """`tokens`: the tokens whose loss is furthest above a reference model's (Rho-1, Lin et al. 2024, arXiv:2404.07965).

    The share `keep` of the global batch's supervised tokens with the highest excess loss counts, and the loss is the
    mean over these (equations 3 to 5; the paper ranks the tokens of a batch too). Ties, to a thousandth of a nat, are
    broken at random, as a function of seed and step.

    Args:
        reference: None where nothing trains.
    """

    def __init__(
        self,
        train: Examples,
        config: TrainingSections,
        steps: int | None,
        ranks: Ranks,
        reference: ReferenceLosses | None = None,
    ) -> None:
        super().__init__(train, config, steps, ranks)
        self._reference = reference

    def drawn(self, rows: Indices, losses: RowLosses | None) -> Draw:
        assert losses is not None and self._reference is not None
        row_U, first_U, times_U = np.unique(losses.rows, return_index=True, return_counts=True)
        excess = {
            int(row): losses.label_losses[at].astype(np.float64) - self._reference[int(row)]
            for row, at in zip(row_U, first_U, strict=True)
        }
        excess_N = np.concatenate(list(excess.values()))
        kept_N = highest(excess_N, self.section.keep, seed=[self.config.seed, 13, self._step])
        kept = dict(zip(excess, np.split(kept_N, np.cumsum([len(each) for each in excess.values()])[:-1]), strict=True))
        self._excess, self._kept = float(excess_N.mean()), float(excess_N[kept_N].mean())
        return Draw(rows, token_weights=normalised(kept, self.train.supervised[row_U] * times_U))

    def metrics(self) -> dict[str, float]:
        return {"excess_loss": self._excess, "kept_excess_loss": self._kept}


def highest(excess_N: Floats, share: float, *, seed: list[int]) -> Mask:
    """Mask (N,) of the share of tokens with the highest excess loss; at least one. Ties are broken at random.

    Args:
        seed: Of the random numbers.
    """
    count = max(1, round(share * len(excess_N)))
    chance_N = np.random.default_rng(seed).random(len(excess_N))
    order_N = np.lexsort((chance_N, -np.round(excess_N / STEP)))
    kept_N = np.zeros(len(excess_N), dtype=np.bool_)
    kept_N[order_N[:count]] = True
    return kept_N


def normalised(kept: Mapping[int, Mask], supervised_U: Weights) -> dict[int, Floats]:
    """Factors of each row's tokens with which the mean over all tokens equals the mean over the kept ones.

    Args:
        supervised_U: Weight of each row in the mean over all: its tokens, times how often a token counts.
    """
    share_U = np.asarray([mask.mean() for mask in kept.values()])
    factor = supervised_U.sum() / (supervised_U @ share_U)
    return {row: mask * factor for row, mask in kept.items()}
