"""Settings that `data.fold` does not go with, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.config.sections.run_sections import RunSections
from workbench.config.task_facts import names


def mistakes(config: RunSections) -> Iterator[str]:
    """Contradictions to `data.fold`, one sentence for each."""
    data, fold = config.data, config.data.fold
    if fold.of is None:
        if fold != type(fold)():
            yield "data.fold says what is held out, and not of how many folds. Write data.fold.of=5 as well."
        return
    ordered = [f"data.fold.{name}" for name in ("group", "column", "time") if getattr(fold, name)]
    if ordered and data.sources:
        yield f"{ordered[0]} names a column of one file, and data.sources names several. Write data.train=FILE."
    if not config.task.folds or config.over is not None:
        why = "folds.k says how many there are" if config.crossvalidates else f"recipe={config.recipe} does not read it"
        yield f"data.fold is for recipe={names(lambda task: task.folds)}: {why}. Leave data.fold out."
    if fold.number >= fold.of:
        yield f"data.fold.number={fold.number} is none of {fold.of} folds, which are numbered from 0 to {fold.of - 1}."
    if data.differs("held_out"):
        yield "data.fold holds out a fold of data.train in place of data.held_out. Leave one of them out."
    if data.streaming.on:
        yield "data.fold looks at all rows, and data.streaming reads a part of them. Leave one of them out."
