"""The section `data.select`; workbench/data/selection.py carries it out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from workbench.schema import ConsistentSection, Unit

Share = Annotated[float, Field(gt=0, lt=1)]


class SelectConfig(ConsistentSection):
    """Training on a chosen part of the training rows; held-out and test rows are all scored."""

    by: Literal["all", "random", "importance", "perplexity", "ifd", "gradient"] = "all"
    """No choice, even chances (the control of every other choice), or chances by likeness to `target` (DSIR). By the
    backbone before it trains. For recipe sft: a `band` of the `perplexity` of what carries loss (Marion et al. 2023),
    or `ifd`, how little a prompt helps to foresee its answer: the highest are kept of those that it helps at all (Li et
    al. 2023). For recipes sft and classify `gradient`: rows whose steps would most lower the loss of `target`, at four
    points of a short training on `warm_up` of the rows (LESS, Xia et al. 2024); that is four epochs on all rows, one at
    a time, which takes twice as long as in batches, and longer where rows are short. Why: choices pay where data holds
    much that is off the subject, which nobody knows of yours (scripts/bench/README.md)."""
    rows: Annotated[PositiveInt | Share | None, Unit("rows, or their share")] = None
    """Training rows that are kept, or their share."""
    tokens: Annotated[PositiveInt | None, Unit("tokens")] = None
    """Tokens (patches of pictures) that the kept rows have at most, in place of `rows`."""
    target: str | None = Field(default=None, min_length=1)
    """Rows of the kind that by=importance and by=gradient look for, a file or a hub data set; some hundred do. Not the
    rows that are scored: what was chosen by them, they flatter."""

    band: Literal["low", "middle", "high"] = "middle"
    """by=perplexity: which part of the rows in the order of their loss is kept."""
    warm_up: Share = 0.05
    """by=gradient: share of the rows, drawn at random, of the training that it compares gradients in."""

    @property
    def by_backbone(self) -> bool:
        """Whether the backbone chooses, so that only a run knows the rows."""
        return self.by in ("perplexity", "ifd", "gradient")

    @property
    def by_target(self) -> bool:
        """Whether rows are chosen by their likeness to those of `target`."""
        return self.by in ("importance", "gradient")

    @property
    def random_instead(self) -> str:
        """Words for a cure: the setting that chooses as many rows at random, and keys that do not go with it."""
        others = [f"data.select.{key}" for key in ("target", "band", "warm_up") if self.differs(key)]
        return "data.select.by=random" + (f", and leave {' and '.join(others)} out" if others else "")

    def in_words(self) -> list[str]:
        """Sentence on what the backbone does before it trains; none where it chooses nothing."""
        if not self.by_backbone:
            return []
        if self.by == "gradient":
            return [
                f"Choice: first an adapter trains on {self.warm_up:.0%} of the rows, and after each of its four epochs "
                f"the gradient of every row is compared with those of {self.target}: four epochs of single rows."
            ]
        return ["Choice: the run begins with reading all rows, a forward pass without gradients."]

    def _contradictions(self) -> Iterator[str]:
        if self.by != "perplexity" and self.band != "middle":
            yield f"band is for by=perplexity, not for by={self.by}. Leave band out."
        if self.by != "gradient" and self.differs("warm_up"):
            yield f"warm_up is for by=gradient, not for by={self.by}. Leave warm_up out."
        if self.by == "all":
            if given := [key for key in ("rows", "tokens", "target") if getattr(self, key) is not None]:
                yield f"{' and '.join(given)} choose rows, and by=all keeps them all. Write data.select.by=random."
            return
        if (self.rows is None) == (self.tokens is None):
            yield f"by={self.by} needs one budget. Write data.select.rows=0.5 (a share or a number), or tokens."
        if self.by_target and self.target is None:
            yield f"by={self.by} needs rows to resemble. Write data.select.target=FILE."
        if not self.by_target and self.target is not None:
            yield f"target is for by=importance and by=gradient, not for by={self.by}. Leave target out."
