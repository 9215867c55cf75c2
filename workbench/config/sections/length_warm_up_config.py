"""The section `data.length_warm_up`; workbench/data/text/length_warm_up.py carries it out."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from workbench.schema import Section, Unit

MULTIPLE = 8
"""Lengths are multiples of it, which matrix units of accelerators want (Li et al. 2022)."""


class LengthWarmUpConfig(Section):
    """Rows are cut to a length that grows early in the run (Li, Zhang and He, NeurIPS 2022, arXiv:2108.06084).

    What is cut is not trained on in that step; it is as soon as the row comes again when rows are longer.
    """

    start: Annotated[Annotated[int, Field(ge=MULTIPLE)] | None, Unit("tokens")] = None
    """First tokens of a row that the first step reads; null: all of them in every step."""
    until: Annotated[float, Field(gt=0, le=1)] = 0.3
    """Share of the run after which rows are whole."""

    @model_validator(mode="after")
    def _used(self) -> LengthWarmUpConfig:
        if self.start is None and self.differs("until"):
            raise ValueError("until ends what start begins. Write data.length_warm_up.start=64, or leave until out.")
        return self

    def limit(self, step: int, *, steps: int, longest: int) -> int | None:
        """Most tokens of a row in step `step` (from 0) of so many; None where all rows are whole.

        It grows linearly from `start` to the longest row, in multiples of MULTIPLE.
        """
        if self.start is None or step >= self.until * steps:
            return None
        grown = self.start + (longest - self.start) * step / (self.until * steps)
        max_length = max(self.start, int(grown) // MULTIPLE * MULTIPLE)
        return max_length if max_length < longest else None
