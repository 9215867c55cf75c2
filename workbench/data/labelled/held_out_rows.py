"""Labelled rows that are held out of training: split off stratified, without rows that also train, of every class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.config import RunConfig
from workbench.data import overlap
from workbench.data.folds import stratification
from workbench.data.folds.stratified_holdout import hold_out
from workbench.data.labelled import labels
from workbench.data.labelled.labels import Labels
from workbench.data.labelled.records import RecordSource
from workbench.errors import DataError


def split(source: RecordSource, config: RunConfig, *, share: float) -> tuple[RecordSource, RecordSource]:
    """Split off held-out rows, stratified; equal rows stay on the same side."""
    strata = stratification.strata_of(source.labels, k=max(2, round(1 / share)))
    held_out = hold_out(strata, groups=(record.key for record in source.records), share=share, seed=config.seed)
    if not held_out.any():
        count, different = len(source.records), len(set(source.keys))
        equal = "" if count == different else f", of which {different} {'differs' if different == 1 else 'differ'},"
        raise DataError(
            f"{source.name}: {count} row(s){equal} are too few to hold out a share of {share}. "
            "Give more rows, or a file of its own as data.held_out."
        )
    return source.subset(~held_out), source.subset(held_out)


def without_overlap(train: RecordSource, other: RecordSource, *, drop: bool) -> RecordSource:
    """`train` without rows whose content is also in `other`; raises what `overlap.without_overlap` does."""
    but = "" if train.records[0].digest else " but for case and punctuation"  # pictures are equal whole
    return overlap.without_overlap(train, other, drop=drop, but=but)


def require_measured(
    meaning: Labels, train: Sequence[Any], held_out: Mapping[str, RecordSource], config: RunConfig
) -> None:
    """Raise DataError where the held-out rows, all sets of them together, lack a class.

    Args:
        train: The label of each training row.
    """
    if meaning.kind == "number" or not config.classes.every_class:
        return
    measured = labels.counts([label for source in held_out.values() for label in source.labels])
    trained, named = labels.counts(train), " + ".join(source.name for source in held_out.values())
    for name in meaning.names:
        if name not in measured:
            raise DataError(
                f"{named}: no held-out row has the class `{name}`, which has {trained[name]} training row(s). "
                "Give it more distinct rows, leave it out, or write classes.every_class=false to accept a class "
                "without a score."
            )
