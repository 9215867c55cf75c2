"""Section `token_drop`: tokens that the middle blocks of a backbone pass by, which saves their time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field, PositiveInt

from workbench.schema import Section, Unit


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
