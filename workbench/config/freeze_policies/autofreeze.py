"""Policy `autofreeze`: the first blocks freeze as their gradients stop changing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, PositiveInt

from workbench.config.freeze_config import FreezeConfig, LayerPlan, Moment, register
from workbench.config.freeze_policies.layer_plans import above
from workbench.schema import Unit

_TINY = 1e-30


@register
class AutoFreeze(FreezeConfig):
    """AutoFreeze (Liu et al. 2021, arXiv:2102.01386): gradients say which of the first blocks may freeze.

    A block's eta is the relative change | |D'| - |D| | / |D'| of the norm of its gradient, summed over an interval,
    from one interval to the next. From the first block that trains on, blocks freeze until one whose eta is not below
    the percentile of all that train, as in the authors' code: so one with the largest eta always trains. The
    embeddings, which the paper does not look at, freeze with the first block; blocks that have nothing to train stop
    nothing.
    """

    policy: Literal["autofreeze"] = "autofreeze"
    every: Annotated[PositiveInt, Unit("steps")] = 50
    """Optimizer steps of an interval; the paper takes a tenth to a twentieth of the run."""
    percentile: Annotated[float, Field(gt=0, le=100), Unit("percent")] = 50.0
    """Which percentile of the etas is the bound, in percent."""
    most: Annotated[float, Field(gt=0, le=1)] = 0.75
    """Largest share of the blocks that freezes; 1 is the paper's rule."""

    @property
    def observes(self) -> Literal["gradients", "activations", "values"] | None:
        return "gradients"

    @property
    def interval(self) -> int:
        return self.every

    def plan(self, moment: Moment, *, blocks: int) -> LayerPlan:
        frozen = 0
        for before, after in pairwise(moment.seen):
            frozen = self._after(frozen, _changes(before.values[1:-1], after.values[1:-1]))
        return above(frozen, blocks=blocks)

    def _after(self, frozen: int, etas: Sequence[float]) -> int:
        """How many blocks are frozen after one more interval."""
        active = [eta for eta in etas[frozen:] if not math.isnan(eta)]
        if not active:
            return frozen
        bound, most = np.percentile(active, self.percentile), int(self.most * len(etas))
        while frozen < most and not etas[frozen] >= bound:
            frozen += 1
        return frozen


def _changes(before: Sequence[float], after: Sequence[float]) -> list[float]:
    """The eta of each block; NaN where it does not train."""
    return [abs(old - new) / max(old, _TINY) for old, new in zip(before, after, strict=True)]
