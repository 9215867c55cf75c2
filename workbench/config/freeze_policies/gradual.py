"""Policy `gradual`: layers start to train one after another, from the top."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from workbench.config.freeze_config import FreezeConfig, LayerPlan, Moment, register
from workbench.config.freeze_policies.layer_plans import full_rate


@register
class Gradual(FreezeConfig):
    """Gradual unfreezing (ULMFiT, Howard & Ruder 2018, arXiv:1801.06146).

    The paper thaws a layer in each epoch; here block i of n thaws at the share until (n - i) / n of the run, and the
    embeddings at `until`. The last block trains from the beginning, with what comes after it: over an adapter, which
    has nothing there, nothing would train otherwise.
    """

    policy: Literal["gradual"] = "gradual"
    until: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the run after which everything trains."""

    def plan(self, moment: Moment, *, blocks: int) -> LayerPlan:
        thawed = (moment.share >= self.until * ((blocks - layer) / blocks) for layer in range(blocks + 1))
        return full_rate([*thawed, True])
