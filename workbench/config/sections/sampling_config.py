"""The section `data.sampling`; workbench/training/sampling carries it out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from workbench.schema import ConsistentSection, MayExecute, Unit

Share = Annotated[float, Field(gt=0, lt=1)]

USED_BY = {
    "prune": ("infobatch",),
    "until": ("infobatch", "selective"),
    "pool": ("importance", "selective"),
    "power": ("selective",),
    "tilt": ("tilted",),
    "keep": ("tokens",),
    "reference": ("tokens",),
    "trust": ("tokens",),
}
"""Which samplers read which setting."""
DRAWING = ("infobatch", "importance", "selective")
"""Samplers that say which rows come; the others say how much those that come count."""


class SamplingConfig(ConsistentSection):
    """Which rows a step trains on, or how much its rows and tokens count, by the losses that the run itself measures.

    A run takes as many steps as without it: rows that are left out make room for more passes over the others. To save
    their time instead, lower train.epochs.
    """

    by: Literal["all", "infobatch", "importance", "selective", "tilted", "tokens"] = "all"
    """`infobatch`: from the second pass on a share of the rows of low loss is left out, and the others of these count
    more, so that the mean gradient stays the same (Qin et al. 2024). `importance`: rows with large gradients come more
    often, with weights that keep the mean gradient, as soon as that pays for looking at more rows than are trained
    (Katharopoulos and Fleuret 2018). `selective`: rows of high loss come more often, without weights, which is biased
    towards them (Jiang et al. 2019). `tilted`: rows of high loss count more, which is biased towards them (Li et al.
    2021). `tokens`: only the tokens count whose loss is furthest above that of a reference model, which is biased
    towards them (Lin et al. 2024). Why: no way of drawing rows gained at equal compute on each set of
    rows that was tried (scripts/bench/README.md)."""
    prune: Share = 0.5
    """infobatch: share of the rows whose loss is below the mean that a pass leaves out."""
    until: Share = 0.875
    """infobatch, selective: share of the run after which all rows are drawn evenly again."""
    pool: Annotated[int, Field(ge=2, le=32), Unit("rows for each row of a step")] = 3
    """importance, selective: rows that are looked at for each row of a step, in a forward pass without gradients."""
    power: PositiveFloat = 1.0
    """selective: a row's chance is this power of the share of the pool that has a lower loss."""
    tilt: Annotated[float, Field(ge=-100, le=100)] = 1.0
    """tilted: a row counts in proportion to exp(tilt * its loss), in nats a token; towards 0 all count alike. Negative:
    rows of high loss count less, against wrong labels."""
    keep: Share = 0.6
    """tokens: share of a step's supervised tokens that count; the paper keeps 0.6 and 0.7."""
    reference: str | None = Field(default=None, min_length=1)
    """tokens: a model that was trained on rows to be trusted: a run directory of recipe sft, a folder, a hub id, or
    `backbone`, which is what the run itself begins with. It has the run's tokenizer, and reads the training rows once,
    before the first step; its losses are kept below WORKBENCH_CACHE."""
    trust: MayExecute = False
    """tokens: execute the Python code that the reference's run directory names. Only of those whom you trust."""

    def _contradictions(self) -> Iterator[str]:
        for key, samplers in USED_BY.items():
            if self.by not in samplers and self.differs(key):
                yield f"{key} is for by={'|'.join(samplers)}, not for by={self.by}. Leave {key} out."
        if self.by == "tokens" and self.reference is None:
            yield "by=tokens compares with a model: write data.sampling.reference=RUN, a run on rows to be trusted."
        if self.by == "tilted" and self.tilt == 0:
            yield "tilt=0 lets all rows count alike. Write data.sampling.by=all, or another tilt."

    @property
    def draws(self) -> bool:
        """Whether it says which rows come, and how often."""
        return self.by in DRAWING

    @property
    def looks(self) -> int:
        """Rows that are looked at for each row of a step that it changes."""
        return {"importance": self.pool, "selective": self.pool, "tilted": 1, "tokens": 1}.get(self.by, 0)

    def in_words(self) -> str:
        """One sentence on what it does."""
        if self.by == "infobatch":
            what = f"from the second pass on, {self.prune:.0%} of the rows of low loss are left out"
        elif self.by == "importance":
            what = f"rows with large gradients come more often, out of {self.pool} for each, where that pays"
        elif self.by == "selective":
            what = f"rows of high loss come more often, out of {self.pool} for each; this is biased towards them"
        elif self.by == "tilted":
            more = "more" if self.tilt > 0 else "less"
            what = f"rows of high loss count {more}, by exp({self.tilt:g} * loss); this is a bias"
        else:
            what = (
                f"{self.keep:.0%} of a step's supervised tokens count, those of which the loss is furthest above that "
                f"of {self.reference}; this is biased towards them"
            )
        late = f"; all rows after {self.until:.0%} of the run" if self.by in USED_BY["until"] else ""
        return f"Sampling ({self.by}): {what}{late}."


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
            cure = "Write data.select.rows=0.5 (a share or a number), or" if self.rows is None else "Leave out rows or"
            yield f"by={self.by} needs one budget. {cure} tokens."
        if self.by_target and self.target is None:
            yield f"by={self.by} needs rows to resemble. Write data.select.target=FILE."
        if not self.by_target and self.target is not None:
            yield f"target is for by=importance and by=gradient, not for by={self.by}. Leave target out."
