"""Section `layer_drop`: blocks that whole steps leave out, which saves their time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, PositiveFloat

from workbench.schema import Section

_DRAWS = 0x1A7E9
"""Tells these draws from others of the same seed and step."""


class LayerDropConfig(Section):
    """Off by default. Evaluation and answers use every block: a block that computes adds what it adds on average."""

    rate: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Chance of the last block to be left out of a step, at last; usually 0.5 with rates=deeper, 0.2 with even."""
    rates: Literal["deeper", "even"] = "deeper"
    """`deeper`: chances grow evenly from the first block to the last, as in progressive layer dropping (Zhang & He
    2020). `even`: every block has the same (LayerDrop, Fan et al. 2020)."""
    ramp: PositiveFloat | None = 100.0
    """Chances begin at 0 and come to theirs by 1 - exp(-ramp * share of the run), so that with 100 they are there after
    a few hundredths of it (Zhang & He 2020, equation 6); null: from the first step on."""

    @property
    def is_on(self) -> bool:
        """Whether any block is ever left out."""
        return self.rate > 0

    def chances(self, share: float, *, blocks: int) -> list[float]:
        """Chance of each block to be left out of a step, after a share of the run."""
        come = 1.0 if self.ramp is None else -math.expm1(-self.ramp * share)
        deeper = self.rates == "deeper"
        return [self.rate * come * ((number + 1) / blocks if deeper else 1.0) for number in range(blocks)]

    def left_out(self, step: int, share: float, *, blocks: int, seed: int) -> list[bool]:
        """Which blocks step `step` (from 0) leaves out: a function of seed, step and share of the run alone."""
        drawn = np.random.default_rng([seed, step, _DRAWS]).random(blocks)
        return [bool(each < chance) for each, chance in zip(drawn, self.chances(share, blocks=blocks), strict=True)]

    def in_words(self) -> Iterator[str]:
        """Yield a sentence on what is left out, where anything is."""
        if self.is_on:
            whose = "the last block and earlier ones less often" if self.rates == "deeper" else "each block"
            when = "" if self.ramp is None else f", coming as 1 - exp(-{self.ramp:g} * share of the run)"
            yield f"layer_drop: steps leave out {whose} with chance {self.rate:g}{when}. They are not computed."
