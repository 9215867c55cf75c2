"""Policy `lisa`: a few blocks train at a time, drawn anew every so many steps."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import PositiveInt, model_validator

from workbench.config.freeze_config import FreezeConfig, LayerPlan, Moment, register
from workbench.config.freeze_policies.layer_plans import full_rate
from workbench.schema import Unit


@register
class Lisa(FreezeConfig):
    """LISA (Pan et al. 2024, arXiv:2403.17919): layerwise importance sampled AdamW.

    The embeddings and what comes after the blocks always train. Which blocks do is a function of the run's seed and
    of the step; every block is drawn equally often.
    """

    policy: Literal["lisa"] = "lisa"
    active: Annotated[PositiveInt, Unit("blocks")] = 2
    """Blocks that train at a time."""
    every: Annotated[PositiveInt, Unit("steps")] = 20
    """Optimizer steps until other blocks are drawn."""

    @property
    def thaws(self) -> bool:
        return True

    @model_validator(mode="after")
    def _keeps_no_prefix(self) -> Lisa:
        if self.cache in ("memory", "disk"):
            raise ValueError(
                f"lisa freezes no prefix whose outputs freeze.cache={self.cache} could keep. Leave freeze.cache out."
            )
        return self

    def refusal(self, blocks: int) -> str | None:
        if self.active <= blocks:
            return None
        return (
            f"freeze.active={self.active} is more than the {blocks} blocks of this backbone. "
            f"Write freeze.active={blocks} or less."
        )

    def plan(self, moment: Moment, *, blocks: int) -> LayerPlan:
        generator = np.random.default_rng([moment.seed, moment.step // self.every])
        drawn = set(generator.choice(blocks, size=self.active, replace=False).tolist())
        return full_rate([True, *(block in drawn for block in range(blocks)), True])
