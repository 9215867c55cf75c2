"""Policy `static`: the first layers are frozen from the first step to the last."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from workbench.config.freeze_config import FreezeConfig, LayerPlan, Moment, register
from workbench.config.freeze_policies.layer_plans import above
from workbench.schema import Unit


@register
class Static(FreezeConfig):
    """The embeddings and the first blocks keep the values that they came with."""

    policy: Literal["static"] = "static"
    layers: Annotated[PositiveInt | Annotated[float, Field(gt=0, lt=1)], Unit("blocks, or their share")] = 0.5
    """Blocks that are frozen, counted from the first: their number, or their share, which is at least one block."""

    @property
    def fixed(self) -> bool:
        return True

    def refusal(self, blocks: int) -> str | None:
        if self.layers <= blocks:
            return None
        return (
            f"freeze.layers={self.layers} is more than the {blocks} blocks of this backbone. "
            f"Write a number below {blocks}, or a share such as freeze.layers=0.5."
        )

    def plan(self, moment: Moment, *, blocks: int) -> LayerPlan:
        layers = self.layers
        return above(layers if isinstance(layers, int) else max(1, round(layers * blocks)), blocks=blocks)
