"""The sections `data.sources`, `data.mix` and `data.streaming`; workbench/data/mixture.py carries them out."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from workbench.schema import Section, Unit


class SourceConfig(Section):
    """One of several sources of training rows."""

    path: str = Field(min_length=1)
    """A file, a folder of files, or a hub data set id, as `data.train`."""
    weight: PositiveFloat = 1.0
    """How much more often its rows are drawn than those of a source of weight 1."""
    limit: Annotated[PositiveInt | None, Unit("rows")] = None
    """Use only its first `limit` rows."""
    passes: Annotated[PositiveFloat | None, Unit("passes over its rows")] = None
    """Most passes over its rows in the whole run; a run that would make more is refused."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Renames its columns, as `data.columns`, which holds where this is empty."""


LEARNING = ("reference", "step_size", "smoothing", "every")
"""Settings of `MixConfig` that only by=learned reads."""


class MixConfig(Section):
    """How often rows of each source are drawn."""

    by: Literal["size", "weight", "learned"] = "size"
    """`size`: a source's chance is its rows (to the power of 1 / temperature) times its weight; `weight`: its weight
    alone, so that weights are proportions; `learned`: begins as `size` does, and goes on to draw more from the sources
    whose loss is furthest above its reference (after DoReMi, Xie et al. 2023, arXiv:2305.10429)."""
    temperature: Annotated[float, Field(ge=1)] = 1.0
    """1 draws each row equally often; higher values draw those of small sources more often (mT5: 3.3). Not with
    by=weight."""
    unit: Literal["rows", "tokens"] = "rows"
    """Unit that chances divide up; with `tokens` a source of long rows is drawn less often."""
    batches: Literal["mixed", "one_source"] = "mixed"
    """Recipe embed: `one_source` fills each global batch from one source, so that in-batch negatives are of the
    anchor's own; shares are then of batches."""
    rows: Annotated[PositiveInt | None, Unit("rows")] = None
    """Rows of an epoch; null: as many as all sources have together."""
    reference: Annotated[dict[str, NonNegativeFloat], Unit("nats a token")] = Field(default_factory=dict)
    """learned: the loss of each source, in nats per token, that it is compared with; those of a model that was trained
    on an even mixture, as in the paper: `loss[NAME]` in the scores.json of such a run. Empty: the backbone's own,
    before it trains; then the sources that have gained least are drawn more, also those of which there is nothing to
    learn."""
    step_size: PositiveFloat = 1.0
    """learned: a source whose loss is one nat further above its reference than that of another has its share raised by
    exp(step_size) more in each update."""
    smoothing: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """learned: this part of each share is that of the beginning, so that no source is given up (the paper: 0.001)."""
    every: Annotated[PositiveInt, Unit("steps")] = 10
    """learned: steps between updates; each is drawn from with whole numbers of rows of each source."""

    @model_validator(mode="after")
    def _fits(self) -> MixConfig:
        if self.by == "weight" and self.temperature != 1:
            raise ValueError("temperature weakens sizes, and mix.by=weight has none. Leave one of them out.")
        defaults = MixConfig.model_construct()
        given = [key for key in LEARNING if getattr(self, key) != getattr(defaults, key)]
        if self.by != "learned" and given:
            raise ValueError(
                f"{', '.join(given)}: for mix.by=learned, not for mix.by={self.by}. Leave {' and '.join(given)} out."
            )
        return self

    def in_words(self) -> str:
        """One sentence on what is learnt, or on batches; empty where neither is to be told."""
        if self.batches == "one_source":
            return "Batches are of one source each; shares are of batches."
        if self.by != "learned":
            return ""
        what = "given losses" if self.reference else "the backbone's own"
        return (
            f"Mixture (learned): shares as above at the beginning; every {self.every} steps those of the sources "
            f"whose losses are furthest above {what} rise."
        )


class StreamingConfig(Section):
    """Training rows of a data set that is larger than the disk: no more are fetched than the run draws."""

    on: bool = False
    """Read rows of `train` through `datasets`' streaming, eight of its shards in turn, in an order that follows from
    the seed, until there are as many as the run draws once: train.steps times batch.size, and those that are held out;
    or `limit`. They stand on this machine's disk before the first step."""
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the rows on the way that are taken, by chance: 0.1 spreads them over ten times as much of the data."""

    @model_validator(mode="after")
    def _fits(self) -> StreamingConfig:
        if not self.on and self.share != 1:
            raise ValueError("share is for streaming.on=true. Leave it out; data.select.by=random chooses from a file.")
        return self
