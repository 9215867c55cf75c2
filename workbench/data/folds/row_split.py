"""Rows dealt into folds: stratified by class, whole groups together, the same on every machine.

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
"""Classes of each row: one, several where a row has several labels, none where only the number of rows counts."""
Groups: TypeAlias = Sequence[str]
"""A name for each row; rows with equal names stay together."""


class Split(NamedTuple):
    """One fold of one repeat."""

    repeat: int
    fold: int
    train_N: NDArray[np.bool_]
    validation_N: NDArray[np.bool_]


@dataclass(frozen=True)
class FoldAssignment:
    """Which fold validates each row; all the others train on it."""

    fold_RN: NDArray[np.int64]
    """Fold of each row, from 0, in each repeat."""
    names: tuple[str, ...]
    """What a person calls each fold."""

    @property
    def k(self) -> int:
        """Number of folds."""
        return len(self.names)

    def splits(self) -> Iterator[Split]:
        """Every fold of every repeat."""
        for repeat, fold_N in enumerate(self.fold_RN):
            for fold in range(self.k):
                yield Split(repeat, fold, fold_N != fold, fold_N == fold)


def assign(strata: Strata, *, groups: Groups, k: int, repeats: int = 1, seed: int = 0) -> FoldAssignment:
    """Deal groups into k folds so that every fold gets its share of every class.

    Groups with several classes come first, the largest before others, each to the fold where the sum over its classes
    of squared shares grows least. Then class by class the largest groups first, each to the fold with the fewest rows
    of the class, of those to a smallest fold. Two bounds follow. The rows of a class in two folds differ by no more
    than the largest group of that class alone, or all its rows in groups with several classes, whichever is more. Fold
    sizes differ by no more than one where every row has one class, or none, and is a group of its own.

    The choice among equal groups and folds comes from a hash of seed, repeat and the group's name, so the folds are the
    same on every machine, and the order of rows does not matter: it permutes the folds along.

    scikit-learn's StratifiedGroupKFold is as even (a test compares them), but weighs every class again for each group,
    which takes 18 times as long with Banking77's 77 classes; shuffled, it still deals the largest groups the same way
    each time; and it knows no rows with several classes.

    Args:
        strata: One tuple for each row.
        groups: One name for each row; as many different ones as rows where no rows are tied together.
        k: Folds, 2 or more.
        repeats: How often the rows are dealt anew.
        seed: Chooses among equally balanced folds.
    """
    sizes, counts = Counter(groups), _counts(strata, groups)
    deals = [_deal(sizes, counts, k, salt=f"{seed} {repeat}") for repeat in range(repeats)]
    fold_RN = np.array([[fold[group] for group in groups] for fold in deals], dtype=np.int64)
    return FoldAssignment(fold_RN, tuple(map(str, range(k))))


def alone(texts: Sequence[str]) -> list[str]:
    """A group for each row; only rows with equal texts depend on their order."""
    seen: Counter[str] = Counter()
    names = []
    for text in texts:
        names.append(f"{text} {seen[text]}")
        seen[text] += 1
    return names


def joined(first: Groups, second: Groups) -> list[str]:
    """The finest groups that tear neither those of `first` nor those of `second` apart.

    Each is called by its smallest name in `first`, so that the order of rows does not matter.
    """
    earliest: dict[tuple[int, str], int] = {}
    keys = [((0, one), (1, other)) for one, other in zip(first, second, strict=True)]
    pairs = [(earliest.setdefault(key, row), row) for row, both in enumerate(keys) for key in both]
    root_N = components(len(first), pairs).tolist()
    name: dict[int, str] = {}
    for root, group in zip(root_N, first, strict=True):
        name[root] = min(name.get(root, group), group)
    return [name[root] for root in root_N]


def ranges(numbers: Sequence[float], *, least: int) -> list[tuple[Class, ...]]:
    """Strata of a regression: about ten ranges of rising numbers, none with fewer rows than `least` but a single one.

    Equal numbers share a range.
    """
    wanted = max(least, math.ceil(len(numbers) / 10))
    stratum: dict[float, int] = {}
    filled = current = 0
    for number, count in sorted(Counter(numbers).items()):
        if filled >= wanted:
            filled, current = 0, current + 1
        stratum[number] = current
        filled += count
    last = current if filled >= wanted else max(0, current - 1)
    return [(min(stratum[number], last),) for number in numbers]


def _counts(strata: Strata, groups: Groups) -> dict[str, Counter[Class]]:
    """Rows of each class in each group."""
    counts: dict[str, Counter[Class]] = {group: Counter() for group in groups}
    for classes, group in zip(strata, groups, strict=True):
        counts[group].update(classes)
    return counts


def _deal(sizes: Mapping[str, int], counts: Mapping[str, Counter[Class]], k: int, *, salt: str) -> dict[str, int]:
    """Fold of each group."""
    total: Counter[Class] = Counter()
    for count in counts.values():
        total.update(count)
    rows_F = [0] * k
    load_F: list[Counter[Class]] = [Counter() for _ in range(k)]
    chosen: dict[str, int] = {}
    for group in _order(sizes, counts, salt):
        count = counts[group]
        # fsum rounds once, so that ties are ties on every machine.
        cost_F = [math.fsum(load[c] * count[c] / total[c] ** 2 for c in count) for load in load_F]
        first = int.from_bytes(_hash(salt, group), "big")
        fold = min(range(k), key=lambda f: (cost_F[f], rows_F[f], (f + first) % k))
        chosen[group] = fold
        rows_F[fold] += sizes[group]
        load_F[fold].update(count)
    return chosen


def _order(sizes: Mapping[str, int], counts: Mapping[str, Counter[Class]], salt: str) -> list[str]:
    """Groups with several classes, then those of one class after the other; the largest first."""

    def key(group: str) -> tuple[bool, str, int, bytes]:
        classes = counts[group]
        one_class = "" if len(classes) > 1 else "".join(map(repr, classes))
        return len(classes) <= 1, one_class, -sizes[group], _hash(salt, group)

    return sorted(sizes, key=key)


def _hash(salt: str, group: str) -> bytes:
    return blake2b(f"{salt} {group}".encode(), digest_size=16).digest()
