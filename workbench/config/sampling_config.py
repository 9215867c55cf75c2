"""The section `data.sampling`; workbench/training/sampling carries it out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, model_validator

from workbench.schema import Section

Share = Annotated[float, Field(gt=0, lt=1)]

USED_BY = {
    "prune": ("infobatch",),
    "until": ("infobatch", "selective"),
    "pool": ("importance", "selective"),
    "power": ("selective",),
}
"""Which samplers read which setting."""


class SamplingConfig(Section):
    """Which rows a step trains on, by the losses that the run itself measures.

    A run takes as many steps as without it: rows that are left out make room for more passes over the others. To save
    their time instead, lower train.epochs.
    """

    by: Literal["all", "infobatch", "importance", "selective"] = "all"
    """`infobatch`: from the second pass on a share of the rows of low loss is left out, and the others of these count
    more, so that the mean gradient stays the same (Qin et al. 2024). `importance`: rows with large gradients come more
    often, with weights that keep the mean gradient, as soon as that pays for looking at more rows than are trained
    (Katharopoulos and Fleuret 2018). `selective`: rows of high loss come more often, without weights, which is biased
    towards them (Jiang et al. 2019)."""
    prune: Share = 0.5
    """infobatch: share of the rows whose loss is below the mean that a pass leaves out."""
    until: Share = 0.875
    """infobatch, selective: share of the run after which all rows are drawn evenly again."""
    pool: Annotated[int, Field(ge=2, le=32)] = 3
    """importance, selective: rows that are looked at for each row of a step, in a forward pass without gradients."""
    power: PositiveFloat = 1.0
    """selective: a row's chance is this power of the share of the pool that has a lower loss."""

    @model_validator(mode="after")
    def _fits(self) -> SamplingConfig:
        if mistakes := list(self._contradictions()):
            raise ValueError(" ".join(mistakes))
        return self

    def _contradictions(self) -> Iterator[str]:
        for key, samplers in USED_BY.items():
            if self.by not in samplers and getattr(self, key) != type(self).model_fields[key].default:
                yield f"{key} is for by={'|'.join(samplers)}, not for by={self.by}. Leave {key} out."

    def in_words(self) -> str:
        """One sentence on what it does."""
        if self.by == "infobatch":
            what = f"from the second pass on, {self.prune:.0%} of the rows of low loss are left out"
        elif self.by == "importance":
            what = f"rows with large gradients come more often, out of {self.pool} for each, where that pays"
        else:
            what = f"rows of high loss come more often, out of {self.pool} for each; this is biased towards them"
        late = f"; all rows after {self.until:.0%} of the run" if self.by in USED_BY["until"] else ""
        return f"Sampling ({self.by}): {what}{late}."
