"""Policy `smartfrz`: the first blocks freeze where a trained predictor says that their values have settled."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, PositiveInt

from workbench.config.freeze_config import FreezeConfig, LayerPlan, Moment, register
from workbench.config.freeze_policies.freezing_predictor import Floats, histories, settled, shipped
from workbench.config.freeze_policies.layer_plans import above
from workbench.schema import Unit

LEAST = 3
"""Intervals before anything freezes: the first say how fast a layer moves."""


@register
class SmartFrz(FreezeConfig):
    """After SmartFRZ (Li et al., ICLR 2023): attention over the history of a layer's values says when it freezes.

    After each interval the predictor looks at the frontmost block that trains, and freezes it where its probability
    reaches `threshold`, then at the next. Nothing thaws, the embeddings freeze with the first block, and the last block
    that trains never does. A threshold of 1 freezes nothing, and changes nothing.

    As in the paper the predictor is trained beforehand, on runs of other models over another task, and learns from how
    similar a layer's outputs are to those at the end of its run (CKA). It differs in its inputs: the paper's are values
    of the layer themselves, cut or padded to one size; these are lengths and angles of their way, which mean the same
    in a layer of any size and in an adapter. And only a first part freezes, as nothing else saves a backward pass here.
    """

    policy: Literal["smartfrz"] = "smartfrz"
    every: Annotated[PositiveInt, Unit("steps")] = 10
    """Optimizer steps of an interval; a twentieth of the run is what the predictor was trained with."""
    threshold: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Probability from which a block counts as settled."""
    most: Annotated[float, Field(gt=0, le=1)] = 0.75
    """Largest share of the blocks that freezes."""

    @property
    def observes(self) -> Literal["gradients", "activations", "values"] | None:
        return "values"

    @property
    def interval(self) -> int:
        return self.every

    @property
    def judges(self) -> int:
        return LEAST

    def plan(self, moment: Moment, *, blocks: int) -> LayerPlan:
        frozen, intervals = 0, len(moment.seen)
        known = histories(np.array([each.values for each in moment.seen])) if intervals >= LEAST else {}
        for count in range(LEAST, intervals + 1):
            then = {block: history_TF[:count] for block, history_TF in known.items() if len(history_TF) >= count}
            frozen = self._after(frozen, then, blocks)
        return above(frozen, blocks=blocks)

    def _after(self, frozen: int, known: Mapping[int, Floats], blocks: int) -> int:
        """How many blocks are frozen after the last interval of these histories."""
        active = [block for block in known if frozen <= block < blocks]
        for block, following in pairwise(active):
            if following > int(self.most * blocks) or self.threshold == 1:
                break
            if settled(known[block], shipped()) < self.threshold:
                break
            frozen = following
        return frozen
