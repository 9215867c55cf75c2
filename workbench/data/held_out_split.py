"""Training, held-out and test rows: a stratified share of rows is held out, and no row is on two sides.

Shapes: N rows, G groups, C classes, P pairs of a group and a class that it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from workbench.data.folds.duplicates import Ints
from workbench.data.folds.stratified_folds import Class, Strata
from workbench.errors import DataError


class Described(Protocol):
    """Rows with facts for the manifest."""

    def facts(self) -> dict[str, Any]:
        """Facts about this set for the manifest and the report."""


R_co = TypeVar("R_co", bound=Described, covariant=True)
S = TypeVar("S", bound=Described)


class Splits(NamedTuple, Generic[R_co]):
    """Training, held-out and test rows of a run."""

    train: R_co
    held_out: R_co
    test: R_co | None

    def named(self) -> dict[str, R_co]:
        """Those that there are, the training rows first, by `train`, `held_out` and `test`."""
        return {name: split for name, split in self._asdict().items() if split is not None}

    def map(self, change: Callable[[R_co], S]) -> Splits[S]:
        """The results of `change` on each."""
        return Splits(change(self.train), change(self.held_out), None if self.test is None else change(self.test))

    def facts(self) -> dict[str, dict[str, Any] | None]:
        """Facts about each by its name; None for test rows that there are not."""
        return {name: None if split is None else split.facts() for name, split in self._asdict().items()}


def hold_out(strata: Strata, *, groups: Iterable[str], share: float, seed: int) -> NDArray[np.bool_]:
    """True for the rows (N,) that are held out: about `share` of each class, at least one row, and never all.

    For each class, rarest first, whole groups are taken in the order of a hash of seed and name until the class has its
    share; of groups with several classes, first those that take no class above its share. The order of rows does not
    matter. A class with a single group, or whose every group is the last one of another class, is not held out.

    Args:
        strata: Classes of each row; rows without any count as a class of their own.
        groups: Group of each row; the rows of a group stay together.
        share: Above 0, below 1.
    """
    strata = [classes or ("",) for classes in strata]
    total = Counter(name for classes in strata for name in classes)
    names = sorted(total, key=lambda name: (total[name], str(name)))
    group_N = _numbers(f"{seed} {group}" for group in groups)
    counts = _Counts.of(strata, group_N, names)
    target_C = [max(1, round(share * total[name])) for name in names]
    taken_C, held_out_G = [0] * len(names), np.zeros(int(group_N.max(initial=-1)) + 1, dtype=bool)
    for number in range(len(names)):
        order = counts.group_P[counts.class_P == number].tolist()
        for strict in (True, False):  # at first no class may exceed its share, then only this one may not
            for group in order:
                if taken_C[number] >= target_C[number]:
                    break
                after = {c: taken_C[c] + own for c, own in counts.of_group(group)}
                exceeds = any(after[c] > target_C[c] and taken_C[c] for c in after if strict or c == number)
                if not held_out_G[group] and not exceeds and all(after[c] < total[names[c]] for c in after):
                    held_out_G[group] = True
                    for c, count in after.items():
                        taken_C[c] = count
    held_out_N: NDArray[np.bool_] = held_out_G[group_N]
    return held_out_N


class _Counts(NamedTuple):
    """Rows of each class in each group that has it: pairs of both, sorted by group."""

    group_P: Ints
    class_P: Ints
    rows_P: Ints

    @classmethod
    def of(cls, strata: Strata, group_N: Ints, names: Sequence[Class]) -> _Counts:
        """Count rows; classes are numbered as `names` is."""
        number = {name: index for index, name in enumerate(names)}
        class_P = np.fromiter((number[name] for classes in strata for name in classes), dtype=np.int64)
        repeats_N = np.fromiter(map(len, strata), dtype=np.int64, count=len(group_N))
        pairs_P, rows_P = np.unique(np.repeat(group_N, repeats_N) * len(names) + class_P, return_counts=True)
        return cls(*np.divmod(pairs_P, max(1, len(names))), rows_P)

    def of_group(self, group: int) -> Iterator[tuple[int, int]]:
        """The classes of a group, each with its rows."""
        part = slice(*np.searchsorted(self.group_P, [group, group + 1]))
        return zip(self.class_P[part].tolist(), self.rows_P[part].tolist(), strict=True)


def _numbers(names: Iterable[str]) -> Ints:
    """Number each name by the order of all hashes; 16 bytes of each are kept, not the names."""
    hashes = bytearray()
    for name in names:
        hashes += blake2b(name.encode(), digest_size=16).digest()
    high_N, low_N = np.frombuffer(hashes, dtype=">u8").reshape(-1, 2).T.astype(np.uint64)
    order = np.lexsort((low_N, high_N))
    high_N, low_N = high_N[order], low_N[order]
    new_N = (high_N[1:] != high_N[:-1]) | (low_N[1:] != low_N[:-1])
    number_N = np.empty(len(order), dtype=np.int64)
    number_N[order[:1]], number_N[order[1:]] = 0, np.cumsum(new_N)
    return number_N


class KeyedRow(Protocol):
    """A row that has a place (file and row) and a key, which is equal for rows with the same content."""

    @property
    def place(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def content(self) -> Hashable:
        """What was read, as it stands."""


class KeyedSource(Protocol):
    """A file by its name, and its rows."""

    @property
    def name(self) -> str: ...
    @property
    def records(self) -> Sequence[KeyedRow]: ...
    def subset(self, keep: npt.NDArray[np.bool_], note: str | None = None) -> Any:
        """The rows that `keep` marks; `note` says what the others were."""


SourceT = TypeVar("SourceT", bound=KeyedSource)


def without_overlap(train: SourceT, other: KeyedSource, *, drop: bool, but: str) -> SourceT:
    """`train` without rows that are also in `other`: refused unless `drop`. Raises DataError: there are such rows, and
    `drop` is false, or no row would be left.

    Args:
        but: In what rows of one key may differ, for the message, such as ` but for case and punctuation`.
    """
    place_of = {record.key: record.place for record in other.records}
    shared_N = np.asarray([record.key in place_of for record in train.records])
    if not shared_N.any():
        return train
    if shared_N.all():
        raise DataError(f"{train.name}: every row is also in {other.name}; nothing is left to train on.")
    if drop:
        rest: SourceT = train.subset(~shared_N, f"{int(shared_N.sum())} rows that are also in {other.name}")
        return rest
    first = train.records[int(shared_N.argmax())]
    raise DataError(
        f"{int(shared_N.sum())} of {len(shared_N)} training rows are also in {other.name}, so its scores would be too "
        f"good: {first.place} equals {place_of[first.key]}{but}.\n"
        "  Write data.overlap=drop to leave them out of training."
    )
