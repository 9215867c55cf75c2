"""Settings that `data.streaming` does not go with, and how many rows it reads."""

from __future__ import annotations

import math
from collections.abc import Iterator

from workbench.config.sections.run_sections import RunSections


def mistakes(config: RunSections) -> Iterator[str]:
    """Contradictions to `data.streaming`, one sentence for each."""
    data = config.data
    if not data.streaming.on:
        return
    if config.reads_pictures:
        yield "data.streaming reads rows of text, not pictures. Leave data.streaming out."
    endless = [name for name, own in data.training_files.items() if own.limit is None]
    if data.sources and endless:
        yield f"data.streaming reads a part of each source. Write data.sources.{endless[0]}.limit=ROWS."
    elif endless and config.crossvalidates:
        yield "data.streaming reads a part of the rows, and recipe=crossval folds all of them. Write data.limit=ROWS."
    elif endless and data.select.by != "all":
        yield "data.select chooses among more rows than the run draws. Write data.limit=ROWS, how many are streamed."
    elif endless and config.train.steps is None:
        yield "data.streaming reads as many rows as the run draws: write train.steps, or data.limit=ROWS."


def rows(config: RunSections) -> dict[str, int]:
    """Rows that are read of each source of training rows, by its name, which is empty where there is one."""
    data = config.data
    drawn = (config.train.steps or 0) * config.batch.size
    kept = 1 - (data.own_share or 0)
    return {name: own.limit or math.ceil(drawn / kept) + 1 for name, own in data.training_files.items()}
