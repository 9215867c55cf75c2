"""Policy `egeria`: the first blocks freeze as what they compute settles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, PositiveFloat, PositiveInt

from workbench.config.freeze_config import FreezeConfig, LayerPlan, Moment, register
from workbench.config.freeze_policies.layer_plans import above
from workbench.schema import Unit


@register
class Egeria(FreezeConfig):
    """After Egeria (Wang et al. 2023, arXiv:2201.06227): the plasticity of the frontmost block says when it freezes.

    A block's plasticity is the similarity-preserving loss between its outputs now and an interval ago. The frontmost
    block that trains freezes, and the next one is looked at, when a line through the last `window` plasticities since
    it is the frontmost is flat. The embeddings freeze with the first block; the last block that trains never does.

    It is not the paper's system. There the reference is an int8 copy of a recent snapshot, which runs on the host
    beside training and is replaced now and then, so that each block is compared with a slightly older self; here a
    block is compared with itself exactly an interval ago, on the same rows, which needs no second model. Padding is
    left out, one line decides, and nothing thaws.
    """

    policy: Literal["egeria"] = "egeria"
    every: Annotated[PositiveInt, Unit("steps")] = 20
    """Optimizer steps between measurements; each runs a micro-batch forward once."""
    window: Annotated[int, Field(ge=2), Unit("measurements")] = 5
    """Measurements that a block is judged by."""
    tolerance: PositiveFloat = 0.05
    """Steepest line that counts as flat: the change from one measurement to the next, as a share of their mean."""

    @property
    def observes(self) -> Literal["gradients", "activations", "values"] | None:
        return "activations"

    @property
    def interval(self) -> int:
        return self.every

    @property
    def judges(self) -> int:
        return self.window

    def plan(self, moment: Moment, *, blocks: int) -> LayerPlan:
        frozen, history = 0, list[float]()
        for observation in moment.seen:
            plasticity = observation.values[1:-1]
            active = [block for block in range(frozen, blocks) if not math.isnan(plasticity[block])]
            if len(active) < 2:
                break
            history.append(plasticity[active[0]])
            if len(history) >= self.window and self._flat(history[-self.window :]):
                frozen, history = active[1], []
        return above(frozen, blocks=blocks)

    def _flat(self, values: Sequence[float]) -> bool:
        """Whether the least-squares line through the values is flat."""
        times = np.arange(len(values)) - (len(values) - 1) / 2
        slope = times @ np.asarray(values) / (times @ times)
        return bool(abs(slope) <= self.tolerance * np.mean(values))
