"""Sections `layer_drop` and `token_drop`: blocks that steps leave out, and tokens that the middle blocks pass by."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, PositiveFloat, PositiveInt

from workbench.schema import Section, Unit

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


class TokenDropConfig(Section):
    """Off by default. The first and the last blocks compute every token, and so does evaluation."""

    keep: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of a row's tokens, or of a picture's patches, that each middle block computes at first; others it passes
    on as they are. Each block draws its own; the first token of a row is always among them. 1: all."""
    until: Annotated[float, Field(gt=0, le=1)] | None = 0.7
    """Share of the run after which middle blocks compute every token; until then their share grows evenly (random-LTD,
    Yao et al. 2022). null: it stays as it is."""
    outer: Annotated[PositiveInt, Unit("blocks")] = 1
    """How many first blocks, and as many last ones, compute every token."""

    @property
    def is_on(self) -> bool:
        """Whether any block ever passes tokens by."""
        return self.keep < 1

    def share(self, done: float) -> float:
        """Share of tokens that middle blocks compute, after a share of the run."""
        if self.until is None or not self.is_on:
            return self.keep
        return min(1.0, self.keep + (1 - self.keep) * done / self.until)

    def work(self, done: float, *, blocks: int) -> float:
        """Share of the work of all blocks, as far as it grows evenly with tokens."""
        middle = max(0, blocks - 2 * self.outer) / max(1, blocks)
        return 1 - middle * (1 - self.share(done))

    def refusal(self, blocks: int) -> str | None:
        """Why it does not work on a backbone of so many blocks, and what to write instead; None where it does."""
        if not self.is_on or blocks > 2 * self.outer:
            return None
        return (
            f"token_drop.outer={self.outer}: the backbone has {blocks} blocks, of which the first and last ones "
            "compute every token, so that none is left in the middle. Leave token_drop out."
        )

    def in_words(self) -> Iterator[str]:
        """Yield a sentence on what is passed by, where anything is."""
        if self.is_on:
            grows = "" if self.until is None else f", growing to all of them after {self.until:.0%} of the run"
            outer = "the first and the last block" if self.outer == 1 else f"the first and the last {self.outer} blocks"
            yield f"token_drop: between {outer}, blocks compute {self.keep:.0%} of each row's tokens{grows}."
