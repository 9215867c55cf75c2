"""Orders of rows that the training itself decides, and the choice of a run's order or sampler.

Self-paced learning (`data.curriculum.by=self_paced`), batches that grow with the gradient noise (`batch.growth`), and
shares of sources that follow their losses (`data.mix.by=learned`).

Legend: N training rows, T rows of a stretch of steps, S sources, M rows of a window.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from workbench.config import TrainingSections
from workbench.data import mixture
from workbench.data.batching import Examples, Indices, evenly_spaced, global_batch
from workbench.data.mixture import Floats, MixedRows
from workbench.data.row_order import RowOrder, draws_of_rows, step_sizes
from workbench.errors import ConfigError
from workbench.runs.ranks import Ranks
from workbench.training.optim.noise_scale import NoiseScale
from workbench.training.row_losses import RowLosses, joined
from workbench.training.sampling.loss_based import (
    ImportanceSampling,
    InfoBatch,
    ReferenceLosses,
    SelectiveBackprop,
    Tilted,
    TokenSelection,
)
from workbench.training.sampling.sampler import Draw, Sampler

STRETCHES = 16
"""Times in a pass that the losses decide which rows are open."""


class SelfPaced(Sampler):
    """Self-paced learning (Kumar, Packer and Koller, NIPS 2010): rows of low loss come first.

    The share of rows that are open grows as `data.curriculum` says, a pace of its own as in Jiang et al. (AAAI 2015).
    The first pass has all rows, as without a curriculum, and measures their losses; the papers too begin with weights
    that were fitted to all rows. After it, each row comes as often as without a curriculum, at other times. Where the
    open rows do not suffice for the next steps, more are opened.

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
        """Number of the stretch's rows before step `step`."""
        return sum(self._sizes[self._first : step])

    def _hear(self) -> None:
        if (losses := self.new_losses()) is not None:
            self._loss_N[losses.rows] = losses.loss_B


class GrowingBatch(Sampler):
    """The usual order of rows, in batches that double with the noise scale (McCandlish et al. 2018, arXiv:1812.06162).

    After a step that measured a noise scale of 2 B or more, where B is the present batch size, steps have
    min(2 B, `batch.growth`) rows. So the batch follows the critical batch size from below, as section 3.3 of the paper
    suggests; it never shrinks, and the learning rate stays. The number of steps is as configured, so larger batches
    read more rows. All that the size of a step depends on is in checkpoints.
    """

    def __init__(self, train: Examples, config: TrainingSections, steps: int | None, ranks: Ranks) -> None:
        super().__init__(train, config, steps, ranks)
        assert config.batch.growth is not None and config.optimizer.noise_scale is not None
        self._most, self._every = config.batch.growth, config.optimizer.noise_scale
        self._size, self._step, self._drawn = config.batch.size, 0, 0
        """Rows of a step now, steps done, and rows that these had."""
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
        """Ignore them."""

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
        """Number of rows before the present or the next step."""
        return self._drawn if step == self._step else self._drawn + len(self._from(self._drawn))

    def _from(self, drawn: int) -> Indices:
        """The next rows; the last step of a pass has those that are left of it."""
        count = len(self.train)
        epoch, start = divmod(drawn, count)
        draws = global_batch(epoch, rows=count, size=count, seed=self.config.seed)[start : start + self._size]
        return self.train.sample(draws, epoch=epoch)


LOOKED_AT = 256
"""Rows of each source on which its loss is measured before training, evenly spaced; all where it has fewer."""


class LearnedMix(Sampler):
    """Shares of sources that follow their excess losses (after DoReMi, Xie et al. 2023, arXiv:2305.10429).

    Every `every` steps a source's share is multiplied by exp(step_size * excess), where the excess is its loss over the
    rows of this window, as the training computes it anyway, minus its reference. The paper weighs the losses of uniform
    rows in a small model and samples by the mean weights for a large one; here the model that trains samples by them at
    once. The paper clips excesses at 0, token by token; here only differences between sources count.

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
        """Latest loss of each source, over a window that had rows of it."""
        self._reference_S = np.asarray([config.data.mix.reference.get(each, np.nan) for each in config.data.sources])
        self._drawn_S = self._count_S = np.zeros(count, dtype=np.int64)
        """Rows of each source before the window, and in it."""
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
            return np.concatenate([own[evenly_spaced(len(own), LOOKED_AT)] for own in self._rows.members])
        if step >= self._end:
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
        end = self._first + self._mix.every
        return end if self.steps is None or self._first >= self.steps else min(end, self.steps)

    def _plan(self) -> None:
        """Set the number of rows of each source in the window."""
        draws = sum(map(self._size, range(self._first, self._end)))
        quota_S = np.maximum(self._share_S * draws + self._owed_S, 0)
        left_S = self._allowed_S - self._drawn_S
        quota_S = within(quota_S * draws / quota_S.sum(), left_S, self._share_S)
        self._count_S, self._row_M = mixture.rounded(quota_S, draws), None
        self._owed_S = quota_S - self._count_S

    def _of_step(self, step: int) -> Indices:
        """Rows of a step of the window."""
        if self._row_M is None:
            taken = [
                self._rows.taken(number, first=int(before), count=int(count))
                for number, (before, count) in enumerate(zip(self._drawn_S, self._count_S, strict=True))
            ]
            self._row_M = np.random.default_rng([self.config.seed, 12, self._first]).permutation(np.concatenate(taken))
        start = sum(map(self._size, range(self._first, step)))
        return self._row_M[start : start + self._size(step)]

    def _size(self, step: int) -> int:
        """Rows of a step; the last of an epoch has what is left."""
        size, steps = self.config.batch.size, self.steps_per_epoch
        return len(self.train) - size * (steps - 1) if (step + 1) % steps == 0 else size

    def _hear(self) -> None:
        if (losses := self.new_losses()) is not None:
            self._seen_losses = joined([self._seen_losses, losses])

    def _losses(self, losses: RowLosses) -> Floats:
        """Loss of each source (S,), in nats per token; not a number for one without rows."""
        order = np.lexsort((losses.loss_B, losses.rows))  # sums must not depend on the process or step of a row
        rows, loss_B = losses.rows[order], losses.loss_B[order].astype(np.float64)
        source_B, token_B, count = self._source_N[rows], self._rows.supervised[rows], len(self._share_S)
        total_S = np.bincount(source_B, weights=loss_B * token_B, minlength=count)
        token_S = np.bincount(source_B, weights=token_B, minlength=count)
        with np.errstate(invalid="ignore"):
            loss_S: Floats = total_S / token_S
        return loss_S


def reweighted(share_S: Floats, excess_S: Floats, start_S: Floats, *, step_size: float, smoothing: float) -> Floats:
    """Shares after a step of exponentiated gradient on the excess losses.

    share' = (1 - smoothing) * share exp(step_size excess) / sum + smoothing * start: algorithm 1 of DoReMi with the
    initial mixture of the run in the place of a uniform one. Where all excesses are equal, `start_S` stays.
    """
    raised_S = share_S * np.exp(step_size * (excess_S - excess_S.max()))
    new_S: Floats = (1 - smoothing) * raised_S / raised_S.sum() + smoothing * start_S
    return new_S


def within(quota_S: Floats, left_S: Floats, share_S: Floats) -> Floats:
    """Quotas of which none exceeds `left_S`: the excess of a source goes to the others, by their shares.

    The sum is preserved unless it exceeds that of `left_S`.
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


SAMPLERS: dict[str, type[Sampler]] = {
    "infobatch": InfoBatch,
    "importance": ImportanceSampling,
    "selective": SelectiveBackprop,
    "tilted": Tilted,
}


def row_order(
    train: Examples, config: TrainingSections, steps: int | None, ranks: Ranks, reference: ReferenceLosses | None = None
) -> RowOrder | Sampler:
    """The rows of each step of a run of `steps` optimizer steps; None where a budget alone ends it.

    Args:
        reference: What `data.sampling.by=tokens` compares with; None where nothing trains.

    Raises:
        ConfigError: The sampler or the curriculum would never act.
        DataError: No row is easier than another, for a curriculum.
    """
    data = config.data
    if data.sampling.by == "tokens":
        return TokenSelection(train, config, steps, ranks, reference)
    sampler: type[Sampler] | None = SAMPLERS.get(data.sampling.by)
    if config.batch.growth is not None:
        sampler = GrowingBatch
    if data.mix.by == "learned":
        sampler = LearnedMix
    elif data.curriculum.by == "self_paced":
        sampler = SelfPaced
    return RowOrder(train, config, steps) if sampler is None else sampler(train, config, steps, ranks)
