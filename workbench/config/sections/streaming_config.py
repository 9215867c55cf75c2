"""The section `data.streaming`; workbench/data/streaming.py carries it out."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from workbench.schema import Section


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
