"""Shares of the sources of a mixture that follow what is yet to be learnt of each (after DoReMi, Xie et al. 2023,
arXiv:2305.10429).

Legend: S sources, N training rows, M rows of a window.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from workbench.config import TrainingSections
from workbench.data import mixture
from workbench.data.batching import Examples, Indices, evenly_spaced
from workbench.data.mixture import Floats, MixedRows
from workbench.runs.ranks import Ranks
from workbench.training.row_losses import RowLosses, joined
from workbench.training.sampling.sampler import Draw, Sampler

LOOKED_AT = 256
"""Rows of each source on which its loss is measured before training: evenly spaced, or all where it has fewer."""


class LearnedMix(Sampler):
    """Draws windows of `every` steps, each with whole numbers of rows of each source, and then weighs these again.

    A share is multiplied by exp(step_size times the source's excess): its loss over the rows of the window, as the
    training computes it anyway, above its reference. The paper weighs the losses of evenly drawn rows in a small model,
    and draws by the mean of the weights for a large one; here the model that trains draws by them at once. It clips
    excesses at 0, token by token; here only differences between sources count.

    Before the first step the losses of some rows of each source are measured, without gradients.

    Args:
        train: MixedRows, whose shares are those of the beginning.
    """

    def __init__(self, train: Examples, config: TrainingSections, steps: int | None, ranks: Ranks) -> None:
        super().__init__(train, config, steps, ranks)
        assert isinstance(train, MixedRows), "data.mix.by=learned without data.sources is refused"
        self._rows, self._mix = train, config.data.mix
        self._source_N = train.rows.source_N
        self._allowed_S = mixture.allowed(train, config)
        count = len(train.share_S)
        self._share_S, self._owed_S = train.share_S, np.zeros(count)
        self._loss_S = np.full(count, np.nan)
        """The last one of each source, over a window that had rows of it."""
        self._reference_S = np.asarray([config.data.mix.reference.get(each, np.nan) for each in config.data.sources])
        self._drawn_S = self._count_S = np.zeros(count, dtype=np.int64)
        """Rows drawn before the window, and in it."""
        self._first, self._step = 0, 0
        """The window's first step, and the present one."""
        self._row_M: Indices | None = None
        self._seen_losses = joined([])

    @property
    def looks(self) -> bool:
        return bool(np.isnan(self._loss_S).any())

    def rows(self, step: int) -> Indices:
        self._step = step
        if self.looks:
            return np.concatenate([_spread(own) for own in self._rows.members])
        if step >= self._end:
            self._learn()
            self._drawn_S, self._first = self._drawn_S + self._count_S, step
            self._plan()
        return self._of_step(step)

    def ahead(self, step: int) -> Indices:
        return self._of_step(step) if not self.looks and step < self._end else np.empty(0, dtype=np.int64)

    def drawn(self, rows: Indices, losses: RowLosses | None) -> Draw:
        if losses is None:
            return Draw(rows)
        self._loss_S = self._losses(losses)
        self._reference_S = np.where(np.isnan(self._reference_S), self._loss_S, self._reference_S)
        self._plan()
        return Draw(self._of_step(self._step))

    def metrics(self) -> dict[str, float]:
        names, excess_S = self.config.data.sources, self._loss_S - self._reference_S
        shares = {f"mix_share[{name}]": float(each) for name, each in zip(names, self._share_S, strict=True)}
        return shares | {f"excess_loss[{name}]": float(each) for name, each in zip(names, excess_S, strict=True)}

    def state(self) -> dict[str, Tensor]:
        self._hear()
        return {
            "figures": torch.from_numpy(np.stack([self._share_S, self._owed_S, self._loss_S, self._reference_S])),
            "counts": torch.from_numpy(np.stack([self._drawn_S, self._count_S])),
            "first": torch.tensor([self._first]),
            "rows": torch.from_numpy(self._seen_losses.rows),
            "losses": torch.from_numpy(self._seen_losses.loss_B),
        }

    def load(self, state: dict[str, Tensor]) -> None:
        self._share_S, self._owed_S, self._loss_S, self._reference_S = state["figures"].numpy()
        self._drawn_S, self._count_S = state["counts"].numpy()
        self._first, self._row_M, self._new_losses = int(state["first"]), None, []
        rows, losses = state["rows"].numpy(), state["losses"].numpy()
        self._seen_losses = RowLosses(rows, losses, np.zeros_like(losses), np.zeros_like(losses))

    @property
    def _end(self) -> int:
        """The step after the window."""
        end = self._first + self._mix.every
        return end if self.steps is None or self._first >= self.steps else min(end, self.steps)

    def _learn(self) -> None:
        """Weigh the sources by the losses of the window that ends."""
        self._hear()
        found_S = self._losses(self._seen_losses)
        self._loss_S = np.where(np.isnan(found_S), self._loss_S, found_S)
        self._share_S = reweighted(
            self._share_S,
            self._loss_S - self._reference_S,
            self._rows.share_S,
            step_size=self._mix.step_size,
            smoothing=self._mix.smoothing,
        )
        self._seen_losses = joined([])

    def _plan(self) -> None:
        """Decide how many rows of each source the window has."""
        draws = sum(map(self._size, range(self._first, self._end)))
        quota_S = np.maximum(self._share_S * draws + self._owed_S, 0)
        left_S = self._allowed_S - self._drawn_S
        quota_S = within(quota_S * draws / quota_S.sum(), left_S, self._share_S)
        self._count_S, self._row_M = mixture.rounded(quota_S, draws), None
        self._owed_S = quota_S - self._count_S

    def _of_step(self, step: int) -> Indices:
        """Rows of a step of the window."""
        if self._row_M is None:
            self._row_M = self._window()
        start = sum(map(self._size, range(self._first, step)))
        return self._row_M[start : start + self._size(step)]

    def _window(self) -> Indices:
        """Rows of the window in their order."""
        taken = [
            self._rows.taken(number, first=int(before), count=int(count))
            for number, (before, count) in enumerate(zip(self._drawn_S, self._count_S, strict=True))
        ]
        return np.random.default_rng([self.config.seed, 12, self._first]).permutation(np.concatenate(taken))

    def _size(self, step: int) -> int:
        """Rows of a step; the last of an epoch has what is left."""
        size, steps = self.config.batch.size, self.steps_per_epoch
        return len(self.train) - size * (steps - 1) if (step + 1) % steps == 0 else size

    def _hear(self) -> None:
        if (losses := self.new_losses()) is not None:
            self._seen_losses = joined([self._seen_losses, losses])

    def _losses(self, losses: RowLosses) -> Floats:
        """Loss of each source (S,), in nats per token; not a number for one without rows."""
        order = np.lexsort((losses.loss_B, losses.rows))  # whichever process or step they come from
        rows, loss_B = losses.rows[order], losses.loss_B[order].astype(np.float64)
        source_B, token_B, count = self._source_N[rows], self._rows.supervised[rows], len(self._share_S)
        total_S = np.bincount(source_B, weights=loss_B * token_B, minlength=count)
        token_S = np.bincount(source_B, weights=token_B, minlength=count)
        with np.errstate(invalid="ignore"):
            loss_S: Floats = total_S / token_S
        return loss_S


def reweighted(share_S: Floats, excess_S: Floats, start_S: Floats, *, step_size: float, smoothing: float) -> Floats:
    """Shares after a step of exponentiated gradient on the excess losses, drawn a little to those of the beginning.

    share' = (1 - smoothing) * share exp(step_size excess) / sum + smoothing * start, the paper's algorithm 1 with the
    mixture that the run begins with in the place of an even one. Where all excesses are equal, `start_S` stays.
    """
    raised_S = share_S * np.exp(step_size * (excess_S - excess_S.max()))
    new_S: Floats = (1 - smoothing) * raised_S / raised_S.sum() + smoothing * start_S
    return new_S


def within(quota_S: Floats, left_S: Floats, share_S: Floats) -> Floats:
    """Quotas of which none is above `left_S`: what is too much for one source goes to the others, by their shares.

    The sum stays, as long as it is not above that of `left_S`.
    """
    full_S = np.zeros(len(quota_S), dtype=bool)
    while (quota_S > left_S).any():
        full_S |= quota_S > left_S
        over = np.maximum(quota_S - left_S, 0).sum()
        quota_S = np.minimum(quota_S, left_S)
        if full_S.all():
            break
        quota_S = quota_S + np.where(full_S, 0, over * share_S / share_S[~full_S].sum())
    return quota_S


def _spread(rows: Indices) -> Indices:
    """At most LOOKED_AT of the rows, evenly spaced."""
    chosen = evenly_spaced(len(rows), LOOKED_AT)
    return rows[chosen]
