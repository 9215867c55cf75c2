"""The section `data.select`; workbench/data/selection.py carries it out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from workbench.schema import Section

Share = Annotated[float, Field(gt=0, lt=1)]


class SelectConfig(Section):
    """Training on a chosen part of the training rows; held-out and test rows are all scored."""

    by: Literal["all", "random", "importance"] = "all"
    """No choice, even chances (the control of every other choice), or chances by likeness to `target` (DSIR)."""
    rows: PositiveInt | Share | None = None
    """Training rows that are kept, or their share."""
    tokens: PositiveInt | None = None
    """Tokens (patches of pictures) that the kept rows have at most, in place of `rows`."""
    target: str | None = Field(default=None, min_length=1)
    """Rows of the kind that by=importance looks for, a file or a hub data set; some hundred do. Not the rows that are
    scored: what was chosen by them, they flatter."""

    @model_validator(mode="after")
    def _fits(self) -> SelectConfig:
        if mistakes := list(self._contradictions()):
            raise ValueError(" ".join(mistakes))
        return self

    def _contradictions(self) -> Iterator[str]:
        if self.by == "all":
            if given := [key for key in ("rows", "tokens", "target") if getattr(self, key) is not None]:
                yield f"{' and '.join(given)} choose rows, and by=all keeps them all. Write data.select.by=random."
            return
        if (self.rows is None) == (self.tokens is None):
            yield f"by={self.by} needs one budget. Write data.select.rows=0.5 (a share or a number), or tokens."
        if self.by == "importance" and self.target is None:
            yield "by=importance needs rows to resemble. Write data.select.target=FILE."
        if self.by == "random" and self.target is not None:
            yield "target is for by=importance, not for by=random. Leave target out."
