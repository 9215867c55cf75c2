"""Policy `badam`: one block trains at a time, with an optimizer that begins anew in each."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import PositiveInt, model_validator

from workbench.config.freeze_config import FreezeConfig, LayerPlan, Moment, register
from workbench.config.freeze_policies.layer_plans import full_rate
from workbench.schema import Unit


@register
class Badam(FreezeConfig):
    """BAdam (Luo et al. 2024, arXiv:2404.02827, algorithm 1): block coordinate descent, each block by Adam.

    Every block trains once before any trains again. When the next one begins, the moments of the last are dropped, so
    that no more of them are held than those of a block. The embeddings never train; what comes after the blocks always
    does, as a head that starts at random must.
    """

    policy: Literal["badam"] = "badam"
    every: Annotated[PositiveInt, Unit("steps")] = 50
    """Optimizer steps of a block, until the next one trains."""
    order: Literal["random", "ascending", "descending"] = "random"
    """In which order the blocks of a round train; `random`: drawn anew for each round."""

    @property
    def thaws(self) -> bool:
        return True

    @property
    def forgets(self) -> bool:
        return True

    @model_validator(mode="after")
    def _keeps_no_prefix(self) -> Badam:
        if self.cache in ("memory", "disk"):
            raise ValueError(
                f"badam freezes no prefix whose outputs freeze.cache={self.cache} could keep. Leave freeze.cache out."
            )
        return self

    def plan(self, moment: Moment, *, blocks: int) -> LayerPlan:
        done, place = divmod(moment.step // self.every, blocks)
        active = self._round(moment.seed, done, blocks)[place]
        return full_rate([False, *(block == active for block in range(blocks)), True])

    def _round(self, seed: int, number: int, blocks: int) -> list[int]:
        """Blocks in the order in which they train in a round."""
        if self.order == "random":
            return [int(block) for block in np.random.default_rng([seed, number]).permutation(blocks)]
        return list(range(blocks)) if self.order == "ascending" else list(reversed(range(blocks)))
