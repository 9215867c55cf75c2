"""Rows of several sources, mixed: exact counts in each epoch, a pure function of rows, settings and epoch.

Legend: S sources, N rows, M draws of an epoch, T its global batches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from workbench.config import TrainingSections
from workbench.config.sections.sources_config import MixConfig, SourceConfig
from workbench.data.batching import Examples, Indices, global_batch, steps_per_epoch
from workbench.data.named_sets import RowsOfSets
from workbench.data.resampling import DealtRows, endless
from workbench.errors import ConfigError, DataError

Floats: TypeAlias = npt.NDArray[np.float64]


class MixableRows(Examples, RowsOfSets, Protocol):
    """Rows that know which of several sources each is from."""


R = TypeVar("R", bound=MixableRows)


@dataclass(frozen=True, eq=False)
class MixedRows(DealtRows[R]):
    """Training rows; an epoch samples those of each source by the source's share.

    The draws of a source are an endless row of shuffled passes over its rows, cut into epochs: a row comes again only
    when every other row of its source has come as often, across epochs too.
    """

    share_S: Floats  # share of an epoch's draws that each source has
    draws: int
    seed: int

    def __len__(self) -> int:
        return self.draws

    def table(self, epoch: int) -> Indices:
        """The row of each draw of an epoch (M,): those of each source in turn."""
        before_S, count_S = counts(self.share_S, self.draws, epoch)
        return np.concatenate(
            [
                self.taken(number, first=int(before), count=int(count))
                for number, (before, count) in enumerate(zip(before_S, count_S, strict=True))
            ]
        )

    @cached_property
    def members(self) -> list[Indices]:
        """Rows of each source."""
        return [np.flatnonzero(self.rows.source_N == number) for number in range(len(self.share_S))]

    @cached_property
    def most_draws(self) -> int:
        """Times that an epoch draws a row at most: it may begin and end within a pass over the rows of a source."""
        most_S = np.ceil(self.share_S * self.draws).astype(np.int64) + 1  # what rounding owes is less than a row
        return max(-(-(int(most) - 1) // len(own)) + 1 for most, own in zip(most_S, self.members, strict=True))

    def taken(self, number: int, *, first: int, count: int) -> Indices:
        """`count` rows of source `number`, from its draw `first` (of the whole run) on."""
        return endless(self.members[number], first=first, count=count, seed=(self.seed, 7, number))


@dataclass(frozen=True, eq=False)
class OneSourceBatches(MixedRows[R]):
    """Rows of several sources, one source per global batch: an epoch has whole batches of each.

    In-batch negatives are then of the anchor's own source, and no model tells rows apart by what their source looks
    like (Nussbaum et al. 2024, arXiv:2402.01613; the multi-dataset batch samplers of sentence-transformers).
    """

    size: int  # rows of a global batch; the last one of an epoch has what is left

    def table(self, epoch: int) -> Indices:
        """The row of each draw of an epoch (M,): those that are dealt to one step are of one source."""
        steps = steps_per_epoch(self.draws, self.size)
        rows_T = np.full(steps, self.size)
        rows_T[-1] = self.draws - self.size * (steps - 1)
        # Rows of each source that were drawn before, and the source of each row of the epoch.
        before_S, source_M = np.zeros(len(self.share_S), dtype=np.int64), np.empty(0, dtype=np.int64)
        for each, count_S in enumerate(itertools.islice(counts_of_epochs(self.share_S, steps), epoch + 1)):
            before_S = before_S + np.bincount(source_M, minlength=len(before_S))
            batches = np.repeat(np.arange(len(count_S)), count_S)
            source_M = np.repeat(np.random.default_rng([self.seed, 8, each]).permutation(batches), rows_T)
        row_M = np.empty_like(source_M)
        for number, before in enumerate(before_S):
            own_M = source_M == number
            row_M[own_M] = self.taken(number, first=int(before), count=int(own_M.sum()))
        dealt_M = np.empty_like(row_M)
        dealt_M[global_batch(epoch, rows=len(row_M), size=len(row_M), seed=self.seed)] = row_M
        return dealt_M


def mixed(rows: MixableRows, config: TrainingSections) -> Examples:
    """The training rows as `data.sources` and `data.mix` say; `rows` themselves where there is one source."""
    if not config.data.sources:
        return rows
    if config.data.mix.batches == "one_source":
        return OneSourceBatches[MixableRows](rows, *plan(rows, config), size=config.batch.size)
    return MixedRows[MixableRows](rows, *plan(rows, config))


def plan(rows: MixableRows, config: TrainingSections) -> tuple[Floats, int, int]:
    """Share of the draws that each source has (S,), draws of an epoch, and the seed. Raises DataError: a source has no
    row."""
    sources, mix = config.data.sources, config.data.mix
    size_S = np.bincount(rows.source_N, minlength=len(sources))
    if empty := [name for name, size in zip(sources, size_S, strict=True) if not size]:
        raise DataError(
            f"data.sources.{empty[0]}: no row of it is left to train on, after data.clean, data.overlap, "
            "data.decontaminate and data.select.\n  Leave the source out, or keep more of its rows."
        )
    token_S = np.bincount(rows.source_N, weights=rows.lengths, minlength=len(sources)).astype(np.float64)
    return shares(list(sources.values()), mix, size_S, token_S), mix.rows or len(rows), config.seed


def shares(sources: list[SourceConfig], mix: MixConfig, size_S: Indices, token_S: Floats) -> Floats:
    """Share of the draws that each source has. `size_S`: rows of each source. `token_S`: tokens of each source."""
    weight_S = np.asarray([source.weight for source in sources])
    amount_S = size_S if mix.unit == "rows" else token_S
    chance_S = weight_S * (1 if mix.by == "weight" else amount_S ** (1 / mix.temperature))
    if mix.unit == "tokens":
        chance_S = chance_S / (token_S / size_S)
    share_S: Floats = chance_S / chance_S.sum()
    return share_S


def counts(share_S: Floats, draws: int, epoch: int) -> tuple[Indices, Indices]:
    """How often each source is drawn before an epoch, and in it.

    By the largest remainder; what rounding owes a source is carried into the next epoch, so that over a long run each
    count is exact to less than one row.
    """
    *before, count_S = itertools.islice(counts_of_epochs(share_S, draws), epoch + 1)
    before_S: Indices = np.sum(before, axis=0, dtype=np.int64) if before else np.zeros_like(count_S)
    return before_S, count_S


def counts_of_epochs(share_S: Floats, draws: int) -> Iterator[Indices]:
    """Yield how often each source is drawn in each epoch; see `counts`."""
    owed_S = np.zeros(len(share_S))
    while True:
        quota_S = share_S * draws + owed_S
        count_S = rounded(quota_S, draws)
        owed_S = quota_S - count_S
        yield count_S


def rounded(quota_S: Floats, draws: int) -> Indices:
    """Whole numbers near `quota_S` that add up to `draws`, by the largest remainder."""
    count_S = np.maximum(np.floor(quota_S), 0).astype(np.int64)
    most = np.argsort(-(quota_S - count_S), kind="stable")[: draws - count_S.sum()]
    count_S[most] += 1
    return count_S


def allowed(train: MixedRows[Any], config: TrainingSections) -> Floats:
    """Rows of each source that its `passes` allow in the whole run; infinite where there is no limit."""
    passes_S = [math.inf if source.passes is None else source.passes for source in config.data.sources.values()]
    allowed_S: Floats = np.floor(np.asarray(passes_S) * [len(own) for own in train.members] + 1e-9)
    return allowed_S


def require_passes(train: Examples, config: TrainingSections, steps: int | None) -> None:
    """Raise ConfigError where a source would be read more often than its `passes` allow. `steps`: optimizer steps of
    the run; None where a budget alone ends it."""
    limited = {name: source.passes for name, source in config.data.sources.items() if source.passes is not None}
    if not limited:
        return
    if steps is None:
        raise ConfigError(
            f"data.sources.{next(iter(limited))}.passes: nobody knows how many passes budget alone makes.\n"
            "  Write train.epochs or train.steps too."
        )
    assert isinstance(train, MixedRows)
    drawn = _draws(config, steps)
    if config.data.mix.by == "learned":
        most = allowed(train, config).sum()
        if most < drawn:
            raise ConfigError(
                f"data.sources: their `passes` allow {most:,.0f} rows altogether, and the run draws {drawn:,}.\n"
                "  Write more passes, leave those of one source out, or write fewer train.epochs or train.steps."
            )
        return
    for number, name in enumerate(config.data.sources):
        size, most = len(train.members[number]), limited.get(name)
        passes = train.share_S[number] * drawn / size
        if most is not None and passes > most * (1 + 1e-9):
            enough = math.ceil(passes * 100) / 100
            raise ConfigError(
                f"data.sources.{name}.passes={most:g}: the run draws {train.share_S[number]:.1%} of its {drawn:,} rows "
                f"from there, which is {passes:.2f} passes over {size:,} rows.\n  Write a lower data.sources.{name}"
                f".weight, fewer train.epochs or train.steps, or data.sources.{name}.passes={enough:g}."
            )


def in_words(train: Examples, config: TrainingSections, steps: int | None) -> list[str]:
    """A line for each source: rows, tokens, share of the draws, and passes over its rows."""
    if not isinstance(train, MixedRows):
        return []
    lines = []
    for number, name in enumerate(config.data.sources):
        members, share = train.members[number], float(train.share_S[number])
        known = steps is not None and config.data.mix.by != "learned"
        passes = f", {share * _draws(config, steps or 0) / len(members):.2f} passes" if known else ""
        tokens = int(train.lengths[members].sum())
        lines.append(f"  {name}: {len(members):,} rows, {tokens:,} tokens; {share:.1%} of the draws{passes}")
    about = config.data.mix.in_words()
    return [f"Sources, {train.draws:,} rows an epoch:", *lines, *([about] if about else [])]


def _draws(config: TrainingSections, steps: int) -> int:
    """Rows that a run of `steps` optimizer steps samples; several steps may be on the same rows."""
    return -(-steps // config.steps_on_rows) * config.batch.size
