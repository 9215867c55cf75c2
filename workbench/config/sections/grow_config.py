"""Section `grow`: a backbone that begins with its first blocks and is stacked to all of them during the run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any

from pydantic import Field, field_validator

from workbench.schema import Section, Unit

_SPREAD = 0.6180339887498949
"""The fractional parts of its multiples are spread evenly between 0 and 1."""


class GrowConfig(Section):
    """Progressive stacking (Gong et al. 2019, ICML, algorithm 1). Off by default; over adapter.method=full."""

    at: Annotated[tuple[Annotated[float, Field(gt=0, le=0.9)], ...], Unit("shares of the run")] = ()
    """Shares of the run after which the blocks that train are stacked on top of themselves, as often as `factor` says;
    after the last one all blocks train. Gong et al. stack twice, after 50,000 and 120,000 steps; Du et al. (2024,
    arXiv:2405.15319) once with factor 4, for a language model of N parameters and C operations after d tokens,
    log10 d = 0.88 log10 N + 163.27 / log10 C - 5.74, which in long pretraining is a few hundredths of it or less."""
    factor: Annotated[int, Field(ge=2)] = 2
    """How many times as many blocks there are after each stacking."""

    @field_validator("at", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, float) else value

    @field_validator("at")
    @classmethod
    def _rising(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if any(later <= earlier for earlier, later in pairwise(value)):
            raise ValueError(f"{list(value)}: name each share once, in rising order, such as [0.2, 0.5].")
        return value

    @property
    def is_on(self) -> bool:
        """Whether the backbone ever grows."""
        return bool(self.at)

    def depth(self, step: int, share: float, *, blocks: int) -> int:
        """How many of the backbone's `blocks` compute in step `step` (from 0), after a share of the run.

        Where `blocks` cannot be divided, as in a smaller backbone that a plan times, steps have one more or one fewer,
        so that their mean is right.
        """
        later = sum(share < each for each in self.at)
        return int(blocks / self.factor**later + step * _SPREAD % 1)

    def refusal(self, blocks: int) -> str | None:
        """Why a backbone of so many blocks cannot be grown to, and what to write instead; None where it can."""
        parts = self.factor ** len(self.at)
        if blocks % parts == 0:
            return None
        able = [each for each in range(2, blocks + 1) if blocks % each ** len(self.at) == 0]
        other = f"grow.factor={able[0]}" if able else "grow.at=[0.3] with grow.factor={blocks}"
        return (
            f"grow.at={list(self.at)} with grow.factor={self.factor} begins with one of {parts} equal parts of the "
            f"blocks, and the backbone has {blocks}. Write {other.format(blocks=blocks)}, or leave grow out."
        )

    def in_words(self, blocks: int) -> Iterator[str]:
        """Yield a sentence on the blocks that train when, where they are not always all."""
        if self.is_on:
            first = self.depth(0, 0.0, blocks=blocks)
            whens = [f"{self.depth(0, share, blocks=blocks)} after {share:.0%}" for share in self.at]
            yield (
                f"grow: the first {first} of {blocks} blocks train, stacked to {', '.join(whens)} of the run. What the "
                "backbone's other blocks have learnt is not used."
            )
