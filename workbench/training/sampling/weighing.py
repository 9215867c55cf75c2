"""Rows and tokens that count more or less, by losses which a forward pass measures before the step.

Both look at the whole global batch first, so that micro-batches and processes change nothing.

Legend: B rows of a step, N supervised tokens of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from workbench.config import TrainingSections
from workbench.data.batching import Examples, Indices, Weights
from workbench.runs.ranks import Ranks
from workbench.training.reference_losses import ReferenceLosses
from workbench.training.row_losses import Floats32, RowLosses
from workbench.training.sampling.sampler import Draw, Floats, Sampler, by_row

Mask: TypeAlias = npt.NDArray[np.bool_]

STEP = 2**-10
"""Nats by which excess losses are told apart: below that are the last bits of a forward pass."""


class Weighing(Sampler):
    """Takes the rows that a step has anyway, and says how much each counts. Nothing of it outlasts the step."""

    @property
    def looks(self) -> bool:
        return True

    def rows(self, step: int) -> Indices:
        self._step = step
        return self.evenly.rows(step)

    def ahead(self, step: int) -> Indices:
        return self.evenly.rows(step)

    def rows_done(self, step: int, losses: RowLosses) -> None:
        """Forget them: the next step looks for itself."""

    def state(self) -> dict[str, Tensor]:
        return {}

    def load(self, state: dict[str, Tensor]) -> None:
        """Nothing to go on from."""


class Tilted(Weighing):
    """Minimises a step's tilted loss instead of its mean (TERM, Li et al., ICLR 2021, arXiv:2007.01162): biased.

    That is log(mean over the tokens of exp(tilt * loss of their row)) / tilt, whose gradient is the mean of the rows'
    gradients with weights in proportion to exp(tilt * loss). Their mean over the tokens is 1. Towards an infinite tilt
    only the row of the highest loss counts, as in online hard example mining (Shrivastava et al. 2016).
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
    """Trains on the tokens whose loss is furthest above that of a reference (Rho-1, Lin et al. 2024, arXiv:2404.07965).

    Of all supervised tokens of the global batch the share `keep` with the highest excess loss counts, and the loss is
    the mean over these (equations 3 to 5 of the paper, which ranks the tokens of a batch too). Excess losses that are
    equal to a thousandth of a nat are ranked by chance, a function of seed and step.

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
    """The share of the tokens with the highest excess loss, as a mask (N,); at least one. Equals are ranked by chance.

    Args:
        seed: Of the ranks of equals.
    """
    count = max(1, round(share * len(excess_N)))
    chance_N = np.random.default_rng(seed).random(len(excess_N))
    order_N = np.lexsort((chance_N, -np.round(excess_N / STEP)))
    kept_N = np.zeros(len(excess_N), dtype=np.bool_)
    kept_N[order_N[:count]] = True
    return kept_N


def normalised(kept: Mapping[int, Mask], supervised_U: Weights) -> dict[int, Floats]:
    """Factors of the tokens of each row, with which a mean over all tokens is the mean over those that are kept.

    Args:
        supervised_U: Weight of each row in the mean over all: its tokens, times how often a token counts.
    """
    share_U = np.asarray([mask.mean() for mask in kept.values()])
    factor = supervised_U.sum() / (supervised_U @ share_U)
    return {row: mask * factor for row, mask in kept.items()}
