"""Prompts of several sources as an epoch draws them; each draw has a number, and so answers, of its own.

Legend: N prompts, M draws of an epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from workbench.config import TrainingSections
from workbench.data import mixture, resampling
from workbench.data.batching import Indices
from workbench.data.mixture import MixedRows
from workbench.data.text.tokenized_set import TokenizedSet


@dataclass(frozen=True, eq=False)
class MixedPrompts(MixedRows[TokenizedSet]):
    """Prompts of which number `prompt + repeat * N` is one that its epoch has drawn `repeat` times before."""

    @cached_property
    def numbered(self) -> TokenizedSet:
        """The prompt of each number."""
        return self.rows.subset(np.tile(np.arange(len(self.rows)), self.most_draws))

    def sample(self, draws: Indices, *, epoch: int) -> Indices:
        """Numbers that the draws (of 0 to M - 1) of an epoch take."""
        taken: Indices = _table(self, epoch)[draws]
        return taken


def drawn(prompts: TokenizedSet, config: TrainingSections) -> TokenizedSet | MixedPrompts:
    """The training prompts as `data.sources` and `data.mix` say; `prompts` themselves where there is one source."""
    return MixedPrompts(prompts, *mixture.plan(prompts, config)) if config.data.sources else prompts


@lru_cache(maxsize=2)
def _table(mixed: MixedPrompts, epoch: int) -> Indices:
    """The number of each draw (M,)."""
    row_M = MixedRows.sample(mixed, np.arange(len(mixed)), epoch=epoch)
    return resampling.numbered(row_M, rows=len(mixed.rows), seed=mixed.seed, epoch=epoch)
