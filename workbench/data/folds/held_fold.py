"""The rows of one fold, which a run holds out, and those that it trains on (`data.fold`)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from workbench.config.sections.basic_sections import DataConfig, HeldOutFold
from workbench.config.sections.folds_config import FoldsConfig
from workbench.data.folds import duplicates, stratified_folds
from workbench.data.folds.stratified_folds import Class, Split
from workbench.data.rows import RawRow, read_rows
from workbench.errors import DataError

_known: dict[str, list[str]] = {}
"""Groups of the rows that were looked at last: each fold of a cross-validation asks for the same ones."""


class FoldRow(NamedTuple):
    """A row as folds see it."""

    place: str
    text: str
    key: str
    """Equal for rows that must share a fold, such as answers to a prompt."""
    strata: tuple[Class, ...] = ()
    """What each fold gets its share of."""


def split(fold: HeldOutFold, rows: Sequence[FoldRow], *, config: DataConfig, seed: int) -> Split:
    """The rows that train (N,) and those of the fold, which are held out (N,).

    Args:
        config: Its `train` is the file that the rows are from.
        seed: Decides the folds.

    Raises:
        ConfigError: More folds than groups of rows; a column is unknown.
        DataError: A column has a gap, too few values, or splits a group.
    """
    assert fold.of is not None
    raw = [RawRow(row.place) for row in rows]
    if fold.group or fold.column or fold.time:
        columns = {row.place: row.columns for row in read_rows(config.train, config)}
        raw = [RawRow(row.place, columns[row.place]) for row in rows]
    folds = stratified_folds.deal(
        FoldsConfig(k=fold.of, repeats=fold.repeat + 1, group=fold.group, column=fold.column, time=fold.time),
        raw,
        [row.strata for row in rows],
        clusters=groups(rows, near=fold.near),
        seed=seed,
        every_class=False,
        key="data.fold.of",
    )
    if folds.k != fold.of:
        raise DataError(
            f"folds.column={fold.column}: has {folds.k} values, but data.fold.of={fold.of}. "
            f"Write data.fold.of={folds.k}, or another column."
        )
    part = next(islice(folds.splits(), fold.repeat * fold.of + fold.number, None))
    return part._replace(train_N=np.ones(len(rows), dtype=bool)) if fold.trains else part


def groups(rows: Sequence[FoldRow], *, near: float | None) -> list[str]:
    """Group of each row: rows of one key are together, and near-duplicates where `near` is a similarity."""
    text = hashlib.sha256(repr((near, [(row.key, row.text) for row in rows])).encode()).hexdigest()
    if text not in _known:
        own = [row.key for row in rows]
        if near is not None:
            own = stratified_folds.merge_groups(duplicates.find([row.text for row in rows], threshold=near).groups, own)
        _known.clear()
        _known[text] = own
    return _known[text]
