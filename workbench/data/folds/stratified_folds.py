"""Stratified folds of grouped rows, as the configuration describes them and the same on every machine.

Folds that lack a class in training or validation are refused.

Shapes: R repeats, N rows, F folds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from workbench.config.sections.folds_config import FoldsConfig
from workbench.data.folds.duplicates import DuplicateClusters, components, leaking
from workbench.data.rows import RawRow
from workbench.errors import ConfigError, DataError
from workbench.schema import did_you_mean

Class: TypeAlias = str | int
Strata: TypeAlias = Sequence[tuple[Class, ...]]
"""Classes of each row: one, several where a row has several labels, none where rows are not stratified."""
Groups: TypeAlias = Sequence[str]
"""Group of each row; the rows of a group stay together."""


class Split(NamedTuple):
    """One fold of one repeat."""

    repeat: int
    fold: int
    train_N: NDArray[np.bool_]
    validation_N: NDArray[np.bool_]


@dataclass(frozen=True)
class FoldAssignment:
    """The fold that validates each row; all other folds train on it, or where they are in order, all later ones."""

    fold_RN: NDArray[np.int64]
    """Fold of each row, from 0, in each repeat; -1 for the first rows in time, which no fold validates."""
    names: tuple[str, ...]
    """Name of each fold."""
    ordered_N: NDArray[np.int64] | None = None
    """Group of each row, where a fold trains on earlier folds alone, without rows of a group that it validates."""

    @property
    def k(self) -> int:
        """Number of folds."""
        return len(self.names)

    def splits(self) -> Iterator[Split]:
        """Yield every fold of every repeat."""
        for repeat, fold_N in enumerate(self.fold_RN):
            for fold in range(self.k):
                validation_N, train_N = fold_N == fold, fold_N != fold
                if self.ordered_N is not None:
                    train_N = (fold_N < fold) & ~np.isin(self.ordered_N, self.ordered_N[validation_N])
                yield Split(repeat, fold, train_N, validation_N)

    def subset(self, keep_N: NDArray[np.bool_]) -> FoldAssignment:
        """The folds of some of the rows."""
        ordered_N = None if self.ordered_N is None else self.ordered_N[keep_N]
        return replace(self, fold_RN=self.fold_RN[:, keep_N], ordered_N=ordered_N)


def assign(strata: Strata, *, groups: Groups, k: int, repeats: int = 1, seed: int = 0) -> FoldAssignment:
    """Assign groups to k folds so that every fold gets its share of every class.

    Groups with several classes come first, larger ones before smaller ones, each to the fold where the sum over its
    classes of squared shares grows least. Then the groups of one class after the other, larger ones first, each to the
    fold with the fewest rows of the class and, among those, the fewest rows. Two bounds follow. The rows of a class in
    two folds differ by no more than the largest group of only that class, or all its rows in groups with several
    classes, whichever is more. Fold sizes differ by no more than one where every row has at most one class and is a
    group of its own.

    Ties are broken by a hash of seed, repeat and the group's name, so the folds are the same on every machine and do
    not depend on the order of rows.

    scikit-learn's StratifiedGroupKFold is as even (a test compares them), but evaluates every class again for each
    group, which takes 18 times as long with Banking77's 77 classes; its shuffling leaves the largest groups in place;
    and it has no rows with several classes.

    Args:
        strata: Classes of each row.
        groups: Group of each row; as many groups as rows where no rows belong together.
        k: Number of folds, 2 or more.
        repeats: Number of independent assignments.
        seed: Breaks ties between equally balanced folds.
    """
    sizes, counts = Counter(groups), _class_counts(strata, groups)
    assignments = [_assign_groups(sizes, counts, k, salt=f"{seed} {repeat}") for repeat in range(repeats)]
    fold_RN = np.array([[fold_of[group] for group in groups] for fold_of in assignments], dtype=np.int64)
    return FoldAssignment(fold_RN, tuple(map(str, range(k))))


def singletons(texts: Sequence[str]) -> list[str]:
    """A group for each row, named by its text and how many equal texts come before it."""
    repeats: Counter[str] = Counter()
    names = []
    for text in texts:
        names.append(f"{text} {repeats[text]}")
        repeats[text] += 1
    return names


def merge_groups(first: Groups, second: Groups) -> list[str]:
    """The finest groups that contain whole groups of both `first` and `second`.

    Each has the smallest name of its groups in `first`, so the order of rows does not matter.
    """
    earliest: dict[tuple[int, str], int] = {}
    keys = [((0, one), (1, other)) for one, other in zip(first, second, strict=True)]
    pairs = [(earliest.setdefault(key, row), row) for row, both in enumerate(keys) for key in both]
    root_N = components(len(first), pairs).tolist()
    name: dict[int, str] = {}
    for root, group in zip(root_N, first, strict=True):
        name[root] = min(name.get(root, group), group)
    return [name[root] for root in root_N]


def bin_numbers(numbers: Sequence[float], *, min_rows: int) -> list[tuple[Class, ...]]:
    """Strata of a regression: about ten bins of rising numbers, each of at least `min_rows` where there are several.

    Equal numbers share a bin.
    """
    bin_size = max(min_rows, math.ceil(len(numbers) / 10))
    bin_of: dict[float, int] = {}
    filled = current = 0
    for number, count in sorted(Counter(numbers).items()):
        if filled >= bin_size:
            filled, current = 0, current + 1
        bin_of[number] = current
        filled += count
    last = current if filled >= bin_size else max(0, current - 1)
    return [(min(bin_of[number], last),) for number in numbers]


def _class_counts(strata: Strata, groups: Groups) -> dict[str, Counter[Class]]:
    """Rows of each class in each group."""
    counts: dict[str, Counter[Class]] = {group: Counter() for group in groups}
    for classes, group in zip(strata, groups, strict=True):
        counts[group].update(classes)
    return counts


def _assign_groups(
    sizes: Mapping[str, int], counts: Mapping[str, Counter[Class]], k: int, *, salt: str
) -> dict[str, int]:
    """Fold of each group."""
    total: Counter[Class] = Counter()
    for count in counts.values():
        total.update(count)
    rows_F = [0] * k
    count_F: list[Counter[Class]] = [Counter() for _ in range(k)]
    fold_of: dict[str, int] = {}
    for group in _order(sizes, counts, salt):
        count = counts[group]
        # fsum rounds once, so that equal costs are equal on every machine.
        cost_F = [math.fsum(own[c] * count[c] / total[c] ** 2 for c in count) for own in count_F]
        first = int.from_bytes(_hash(salt, group), "big")
        fold = min(range(k), key=lambda f: (cost_F[f], rows_F[f], (f + first) % k))
        fold_of[group] = fold
        rows_F[fold] += sizes[group]
        count_F[fold].update(count)
    return fold_of


def _order(sizes: Mapping[str, int], counts: Mapping[str, Counter[Class]], salt: str) -> list[str]:
    """Groups with several classes, then those of one class after the other; larger ones first."""

    def key(group: str) -> tuple[bool, str, int, bytes]:
        classes = counts[group]
        one_class = "" if len(classes) > 1 else "".join(map(repr, classes))
        return len(classes) <= 1, one_class, -sizes[group], _hash(salt, group)

    return sorted(sizes, key=key)


def _hash(salt: str, group: str) -> bytes:
    return blake2b(f"{salt} {group}".encode(), digest_size=16).digest()


Label: TypeAlias = Class | float | tuple[Class, ...] | None
"""A class, a float for regression, a tuple where a row may have several classes, None where it has no label."""

SEPARATORS = (",", ";", "|", "/", " ")
_MORE_ROWS = "give it more rows, or write folds.every_class=false to accept folds that validate without it"


def make_folds(
    config: FoldsConfig, rows: Sequence[RawRow], labels: Sequence[Label], *, clusters: Groups, seed: int
) -> FoldAssignment:
    """Make folds; each trains on every class, and validates every class where `every_class` is set.

    Args:
        config: Names a column of folds, or how to assign rows to folds.
        rows: Rows with the columns that `config` names.
        labels: One for each row. Floats are stratified by bins, and a fold may lack a bin.
        clusters: Cluster of duplicates of each row: `DuplicateClusters.groups`, or `singletons(texts)`.
        seed: Seed of the run.

    Raises:
        ConfigError: More folds than groups, or than rows or groups of a class; a class is absent from a fold; a column
            is unknown.
        DataError: A row has no label; a column has a gap or one value; a group of
            `config.group` is in two folds of `config.column`.
    """
    require_labelled(rows, labels)
    strata, numeric = strata_of(labels, k=config.k), any(isinstance(label, float) for label in labels)
    folds = deal(config, rows, strata, clusters=clusters, seed=seed, every_class=config.every_class and not numeric)
    if not numeric:
        require_classes(folds, strata, validated=config.every_class)
    return folds


def deal(
    config: FoldsConfig,
    rows: Sequence[RawRow],
    strata: Strata,
    *,
    clusters: Groups,
    seed: int,
    every_class: bool,
    key: str = "folds.k",
) -> FoldAssignment:
    """Folds as a column gives them, in the order of time, or stratified.

    Args:
        clusters: Group of each row, besides `config.group`.
        every_class: Whether each class must have enough rows for all folds.
        key: The setting that says how many folds there are.

    Raises:
        ConfigError: More folds than groups, or than rows or groups of a class; a column is unknown.
        DataError: A column has a gap, too few values, or splits a group.
    """
    row_groups = column_values(rows, config.group, key="folds.group") if config.group else None
    groups = merge_groups(clusters, row_groups) if row_groups else clusters
    if config.column:
        return read_folds(rows, config, groups=row_groups)
    if config.time:
        return in_order(rows, config, groups=groups)
    require_enough_rows(strata if every_class else [()] * len(rows), groups=groups, k=config.k, key=key)
    return assign(strata, groups=groups, k=config.k, repeats=config.repeats, seed=seed)


def in_order(rows: Sequence[RawRow], config: FoldsConfig, *, groups: Groups) -> FoldAssignment:
    """Blocks of rows in the order of the column `config.time`, k of which are validated, each by all before it.

    Rows of the same time are in the same block. The first block has no past, so no fold validates it.

    Raises:
        DataError: The times cannot be read, or are too few.
    """
    import pandas as pd  # 0.2 s, for a run that asks for it

    assert config.time is not None
    values = pd.Series(column_values(rows, config.time, key="folds.time"))
    times = pd.to_numeric(values, errors="coerce")
    if times.isna().any():
        # What most rows have: a date among numbers is the mistake, as is a number among dates.
        dates = pd.to_datetime(values, errors="coerce", format="mixed", utc=True)
        times = min(dates, times, key=lambda read: int(read.isna().sum()))
    if times.isna().any():
        bad = int(times.isna().to_numpy().argmax())
        raise DataError(
            f"{rows[bad].place}: `{values[bad]}` in the column `{config.time}`, which folds.time names, is neither a "
            "number nor a date. Write dates as 2026-01-31, or with a time as 2026-01-31T09:30:00."
        )
    _, time_N, count_T = np.unique(times.to_numpy(), return_inverse=True, return_counts=True)
    before_T = np.cumsum(count_T) - count_T
    block_N = (before_T * (config.k + 1) // len(rows))[time_N]
    if len(np.unique(block_N)) <= config.k:
        raise DataError(
            f"folds.time={config.time}: its {len(count_T)} different times are too few, or too uneven, for "
            f"folds.k={config.k} folds and the rows before them. Write a smaller folds.k, or another column."
        )
    _, group_N = np.unique(np.asarray(groups), return_inverse=True)
    return FoldAssignment((block_N - 1)[None], tuple(map(str, range(config.k))), group_N)


def strata_of(labels: Sequence[Label], *, k: int) -> Strata:
    """Strata that `assign` balances: classes, or ten bins of numbers, fewer where bins would have under k rows."""
    numbers = [label for label in labels if isinstance(label, float)]
    if numbers and len(numbers) < len(labels):
        raise DataError(
            f"{len(numbers)} of {len(labels)} labels are decimal numbers, the others classes. Give one kind."
        )
    if numbers:
        return bin_numbers(numbers, min_rows=k)
    classes = {label: _classes(label) for label in set(labels)}
    return [classes[label] for label in labels]


def column_values(rows: Sequence[RawRow], name: str, *, key: str) -> list[str]:
    """Values of the column `name`, as text.

    Args:
        key: The key of the configuration that names the column, for messages.

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
            f"none. Fill in the values, leave those rows out, or write {key}=null."
        )
    return [str(row.columns[name]) for row in rows]


def read_folds(rows: Sequence[RawRow], config: FoldsConfig, *, groups: Groups | None = None) -> FoldAssignment:
    """Read the folds from the column `config.column`, in the order of their names; refused where they split a group."""
    assert config.column is not None
    values = column_values(rows, config.column, key="folds.column")
    # Shorter names first, so that 10 comes after 9.
    names = sorted(set(values), key=lambda name: (len(name), name))
    if len(names) == 1:
        raise DataError(
            f"folds.column={config.column}: every row has the value `{names[0]}`, so nothing is left to train on. "
            "Give two values or more, or write folds.column=null to have folds made."
        )
    first: dict[str, int] = {}
    for row, group in enumerate(groups or ()):
        before = first.setdefault(group, row)
        if values[before] != values[row]:
            raise DataError(
                f"{rows[row].place}: is in fold `{values[row]}`, but {rows[before].place}, which has the same value in "
                f"`{config.group}`, is in fold `{values[before]}`. Correct the column `{config.column}`, or write "
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


def require_enough_rows(strata: Strata, *, groups: Groups, k: int, key: str = "folds.k") -> None:
    """Raise ConfigError where there are fewer groups than folds, or fewer rows or groups of a class than folds."""
    if len(set(groups)) < k:
        raise ConfigError(
            f"{key}={k}: the {len(groups)} rows form only {len(set(groups))} groups that must stay together "
            "(near-duplicates, which duplicates.on_duplicate=ignore and data.fold.near=null let be, or folds.group). "
            f"{_remedy(key, len(set(groups)), 'give more rows')}"
        )
    row_counts = Counter(name for classes in strata for name in classes)
    class_groups = {(name, group) for classes, group in zip(strata, groups, strict=True) for name in classes}
    group_counts = Counter(name for name, _ in class_groups)
    for name, count in sorted(row_counts.items(), key=lambda item: (item[1], repr(item[0]))):
        if count < k:
            raise ConfigError(
                f"{key}={k}: the class `{name}` has only {count} row(s), too few for one in every fold. "
                f"{_remedy(key, count, _MORE_ROWS)}{several_in_one(map(str, row_counts))}"
            )
        if group_counts[name] < k:
            raise ConfigError(
                f"{key}={k}: the {count} rows of the class `{name}` form only {group_counts[name]} groups that must "
                "stay together (near-duplicates, or folds.group), so it would be absent from a fold. "
                f"{_remedy(key, group_counts[name], _MORE_ROWS)}"
            )


def several_in_one(names: Iterable[str]) -> str:
    """A sentence, which begins with a space, on names that are lists of classes by their looks: every part of such a
    name is a part of another name too. Empty where none are."""
    names = list(dict.fromkeys(names))
    for separator in SEPARATORS:
        parts = {name: [part.strip() for part in name.split(separator)] for name in names}
        times = Counter(part for found in parts.values() for part in set(found))
        lists = [name for name, found in parts.items() if len(found) > 1]
        if lists and all(times[part] > 1 for name in lists for part in parts[name]):
            return (
                f" `{lists[0]}` looks like {len(parts[lists[0]])} classes: then write classes.kind=several "
                f"classes.separator='{separator}'."
            )
    return ""


def require_classes(folds: FoldAssignment, strata: Strata, *, validated: bool) -> None:
    """Raise ConfigError where a fold trains without a class or, if `validated`, validates without one."""
    every_class = {name for classes in strata for name in classes}
    for split in folds.splits():
        trained, held_out = (
            {name for row in np.flatnonzero(part_N).tolist() for name in strata[row]} for part_N in split[2:]
        )
        where = f"fold `{folds.names[split.fold]}`" + (f" of repeat {split.repeat}" if len(folds.fold_RN) > 1 else "")
        for name in sorted(every_class - trained, key=repr):
            raise ConfigError(
                f"folds: all rows of the class `{name}` are in {where}, so the model that validates there would never "
                "train on it. Spread the class over several folds, give it more rows, or leave it out."
            )
        for name in sorted(every_class - held_out, key=repr) if validated else ():
            raise ConfigError(
                f"folds: the class `{name}` is absent from {where}. Spread its rows over all folds, write a smaller "
                "folds.k, or write folds.every_class=false to accept folds that validate without it."
            )


def ungrouped_leak(clusters: DuplicateClusters, labels: Sequence[Label], *, k: int, seed: int) -> int:
    """Number of rows with a near-duplicate in another fold, were the folds stratified without groups."""
    groups = singletons([clusters.name_U[text] for text in clusters.distinct_N])
    folds = assign(strata_of(labels, k=k), groups=groups, k=k, seed=seed)
    return int(leaking(clusters, folds.fold_RN[0]).sum())


def _is_gap(value: object) -> bool:
    return value is None or value == "" or value != value


def _classes(label: Label) -> tuple[Class, ...]:
    assert label is not None and not isinstance(label, float)
    return label if isinstance(label, tuple) else (label,)


def _remedy(key: str, largest_k: int, otherwise: str) -> str:
    """Advice to write a smaller k, where one is possible, or to do something else."""
    return f"Write {key}={largest_k}, or {otherwise}." if largest_k >= 2 else f"{otherwise.capitalize()}."
