"""Policy `freezeout`: each layer's learning rate falls to zero at a time of its own, and then it is frozen."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from workbench.config.freeze_config import FreezeConfig, LayerPlan, Moment, register


@register
class FreezeOut(FreezeConfig):
    """FreezeOut (Brock et al. 2017, arXiv:1706.04983): layer i anneals by half a cosine, and freezes at its time t_i.

    t_i rises evenly from `first` for the embeddings to 1 for the last block, which what comes after it shares. The
    factor (1 + cos(pi share / t_i)) / 2 multiplies the run's own schedule: the paper's rule is `schedule.name=constant`
    with `schedule.warmup=0`.
    """

    policy: Literal["freezeout"] = "freezeout"
    first: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """t_0, the share of the run after which the embeddings are frozen; where `spacing` is cubic, before it is cubed."""
    spacing: Literal["linear", "cubic"] = "linear"
    """`cubic` takes the cube of every t_i, which freezes sooner; the authors then take first=0.8 and scaled=true."""
    scaled: bool = False
    """Divide a layer's rate by its t_i, so that all layers would travel equally far."""

    def plan(self, moment: Moment, *, blocks: int) -> LayerPlan:
        times = self.times(blocks)
        return LayerPlan(
            tuple(moment.share < time for time in times),
            tuple(self._rate(moment.share, time) for time in times),
        )

    def times(self, blocks: int) -> list[float]:
        """t_i: the share of the run at which each layer freezes."""
        power = {"linear": 1, "cubic": 3}[self.spacing]
        return [(self.first + (1 - self.first) * min(layer / blocks, 1)) ** power for layer in range(blocks + 2)]

    def _rate(self, share: float, time: float) -> float:
        rate = (1 + math.cos(math.pi * min(share / time, 1))) / 2
        return rate / time if self.scaled else rate
