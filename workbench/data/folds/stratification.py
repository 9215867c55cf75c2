"""The folds that a configuration asks for, and refusals of folds that would teach or measure too little."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from workbench.config.folds_config import FoldsConfig
from workbench.data.folds.duplicates import DuplicateClusters, across
from workbench.data.folds.row_split import Class, FoldAssignment, Groups, Strata, alone, assign, joined, ranges
from workbench.data.rows import RawRow
from workbench.errors import ConfigError, DataError
from workbench.schema import did_you_mean

Label: TypeAlias = Class | float | tuple[Class, ...] | None
"""A class, a float for regression, a tuple where a row may have several classes, None where it has no label."""


_MORE = "give it more rows, or write folds.every_class=false to accept folds that validate without it"


def make(
    config: FoldsConfig, rows: Sequence[RawRow], labels: Sequence[Label], *, clusters: Groups, seed: int
) -> FoldAssignment:
    """The folds of `config`: each trains on every class, and validates every class where `every_class` asks for it.

    Args:
        config: Where it names a fold column, nothing is dealt.
        rows: For the columns that `config` names, and for messages.
        labels: One for each row. Floats are dealt by ranges, and no fold is asked to hold every range.
        clusters: Name of each row's cluster of duplicates: `Found.groups`, or `alone(texts)` where none are looked for.
        seed: Of the run.

    Raises:
        ConfigError: More folds than groups, or than rows or groups of a class; a class is absent from a fold; a column
            is unknown.
        DataError: A row has no label; a column has a gap, one value, or another number of folds than `k`; a group of
            `config.group` stands in two folds of `config.column`.
    """
    require_labelled(rows, labels)
    strata, numeric = strata_of(labels, k=config.k), any(isinstance(label, float) for label in labels)
    own = column(rows, config.group, key="folds.group") if config.group else None
    if config.column:
        folds = read(rows, config, groups=own)
    else:
        groups = joined(clusters, own) if own else clusters
        require_enough(strata if config.every_class and not numeric else [()] * len(rows), groups=groups, k=config.k)
        folds = assign(strata, groups=groups, k=config.k, repeats=config.repeats, seed=seed)
    if not numeric:
        require_classes(folds, strata, validated=config.every_class)
    return folds


def strata_of(labels: Sequence[Label], *, k: int) -> Strata:
    """Strata that `assign` balances: classes, or ten ranges of numbers, fewer where k rows would not fit."""
    numbers = [label for label in labels if isinstance(label, float)]
    if numbers and len(numbers) < len(labels):
        raise DataError(
            f"{len(numbers)} of {len(labels)} labels are decimal numbers, the others classes. Give one kind."
        )
    if numbers:
        return ranges(numbers, least=k)
    return [_own(label) for label in labels]


def column(rows: Sequence[RawRow], name: str, *, key: str) -> list[str]:
    """Values of a column, as text.

    Args:
        name: Of the column.
        key: Which key of the configuration names it, for messages.

    Raises:
        ConfigError: No row has the column.
        DataError: Some rows have no value there.
    """
    gaps = [row.place for row in rows if _is_gap(row.columns.get(name))]
    if len(gaps) == len(rows):
        known = sorted({each for row in rows for each in row.columns})
        raise ConfigError(f"{key}={name}: no row has such a column.{did_you_mean(name, known)}")
    if gaps:
        raise DataError(
            f"{gaps[0]}: has no value in the column `{name}`, which {key} names; {len(gaps)} of {len(rows)} rows have "
            f"none. Fill them in, leave those rows out, or write {key}=null."
        )
    return [str(row.columns[name]) for row in rows]


def read(rows: Sequence[RawRow], config: FoldsConfig, *, groups: Groups | None = None) -> FoldAssignment:
    """The folds that the column `config.column` says, in the order of their names; `groups` must not be torn apart."""
    assert config.column is not None
    values = column(rows, config.column, key="folds.column")
    # Shorter first, so that 10 comes after 9.
    names = sorted(set(values), key=lambda name: (len(name), name))
    if len(names) == 1:
        raise DataError(
            f"folds.column={config.column}: every row has the value `{names[0]}`, so nothing is left to train on. "
            "Give two values or more, or write folds.column=null to have the rows dealt."
        )
    if len(names) != config.k:
        raise DataError(
            f"folds.column={config.column}: has {len(names)} values, but folds.k={config.k}. "
            f"Write folds.k={len(names)}, or another column."
        )
    first: dict[str, int] = {}
    for row, group in enumerate(groups or ()):
        before = first.setdefault(group, row)
        if values[before] != values[row]:
            raise DataError(
                f"{rows[row].place}: is in fold `{values[row]}`, but {rows[before].place}, which has the same value in "
                f"`{config.group}`, is in fold `{values[before]}`. Mend the column `{config.column}`, or write "
                "folds.group=null."
            )
    return FoldAssignment(np.array([[names.index(value) for value in values]], dtype=np.int64), tuple(names))


def require_labelled(rows: Sequence[RawRow], labels: Sequence[Label]) -> None:
    """Raise DataError where a row has no label."""
    gaps = [row.place for row, label in zip(rows, labels, strict=True) if label is None]
    if gaps:
        raise DataError(
            f"{gaps[0]}: has no label; {len(gaps)} of {len(rows)} training rows have none. "
            "Label them, or move them to a file of their own."
        )


def require_enough(strata: Strata, *, groups: Groups, k: int) -> None:
    """Raise ConfigError where there are fewer groups than folds, or fewer rows or groups of a class."""
    if len(set(groups)) < k:
        raise ConfigError(
            f"folds.k={k}: the {len(groups)} rows form only {len(set(groups))} groups that must stay together "
            f"(near-duplicates, or folds.group). {_cure(len(set(groups)), 'give more rows')}"
        )
    rows_of = Counter(each for classes in strata for each in classes)
    in_groups = {(each, group) for classes, group in zip(strata, groups, strict=True) for each in classes}
    groups_of = Counter(each for each, _ in in_groups)
    for name, count in sorted(rows_of.items(), key=lambda item: (item[1], repr(item[0]))):
        if count < k:
            raise ConfigError(
                f"folds.k={k}: the class `{name}` has only {count} row(s), too few for one in every fold. "
                f"{_cure(count, _MORE)}"
            )
        if groups_of[name] < k:
            raise ConfigError(
                f"folds.k={k}: the {count} rows of the class `{name}` form only {groups_of[name]} groups that must "
                "stay together (near-duplicates, or folds.group), so it would be absent from a fold. "
                f"{_cure(groups_of[name], _MORE)}"
            )


def require_classes(folds: FoldAssignment, strata: Strata, *, validated: bool) -> None:
    """Raise ConfigError where a class is absent from the training rows of a fold, or from its `validated` rows."""
    classes = {each for own in strata for each in own}
    for split in folds.splits():
        trained, held = (
            {each for row in np.flatnonzero(part_N).tolist() for each in strata[row]} for part_N in split[2:]
        )
        where = f"fold `{folds.names[split.fold]}`" + (f" of repeat {split.repeat}" if len(folds.fold_RN) > 1 else "")
        for name in sorted(classes - trained, key=repr):
            raise ConfigError(
                f"folds: all rows of the class `{name}` stand in {where}, so nothing would teach it to the model that "
                "validates there. Spread the class over several folds, give it more rows, or leave it out."
            )
        for name in sorted(classes - held, key=repr) if validated else ():
            raise ConfigError(
                f"folds: the class `{name}` is absent from {where}. Spread its rows over all folds, write a smaller "
                "folds.k, or write folds.every_class=false to accept folds that validate without it."
            )


def ungrouped_leak(found: DuplicateClusters, labels: Sequence[Label], *, k: int, seed: int) -> int:
    """Rows that would validate while a near-duplicate of theirs is trained on, were folds stratified and no more."""
    own = alone([found.name_U[text] for text in found.text_N])
    folds = assign(strata_of(labels, k=k), groups=own, k=k, seed=seed)
    return int(across(found, folds.fold_RN[0]).sum())


def _is_gap(value: object) -> bool:
    return value is None or value == "" or value != value


def _own(label: Label) -> tuple[Class, ...]:
    assert label is not None and not isinstance(label, float)
    return label if isinstance(label, tuple) else (label,)


def _cure(most: int, otherwise: str) -> str:
    """A smaller k, where there is one, or what else helps."""
    return f"Write folds.k={most}, or {otherwise}." if most >= 2 else f"{otherwise.capitalize()}."
