"""Prompts of several sources as an epoch draws them; each draw has a number, and so answers, of its own.

Legend: N prompts, M draws of an epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

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

    def table(self, epoch: int) -> Indices:
        """The number of each draw of an epoch (M,)."""
        return resampling.numbered(super().table(epoch), rows=len(self.rows), seed=self.seed, epoch=epoch)


def drawn(prompts: TokenizedSet, config: TrainingSections) -> TokenizedSet | MixedPrompts:
    """The training prompts as `data.sources` and `data.mix` say; `prompts` themselves where there is one source."""
    return MixedPrompts(prompts, *mixture.plan(prompts, config)) if config.data.sources else prompts
