"""Stratified folds of grouped rows, the same on every machine.

Shapes: R repeats, N rows, F folds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from workbench.data.folds.similarity import components

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
    """The fold that validates each row; all other folds train on it."""

    fold_RN: NDArray[np.int64]
    """Fold of each row, from 0, in each repeat."""
    names: tuple[str, ...]
    """Name of each fold."""

    @property
    def k(self) -> int:
        """Number of folds."""
        return len(self.names)

    def splits(self) -> Iterator[Split]:
        """Yield every fold of every repeat."""
        for repeat, fold_N in enumerate(self.fold_RN):
            for fold in range(self.k):
                yield Split(repeat, fold, fold_N != fold, fold_N == fold)


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
