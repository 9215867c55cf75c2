"""Training rows whose content is also among rows that are scored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from workbench.errors import DataError


class KeyedRow(Protocol):
    """A row that has a place and a key, which is equal for rows with the same content."""

    @property
    def place(self) -> str:
        """File and row."""

    @property
    def key(self) -> str:
        """Equal for rows with the same content."""


class KeyedSource(Protocol):
    """The rows of a file."""

    @property
    def name(self) -> str:
        """The name of the file."""

    @property
    def records(self) -> Sequence[KeyedRow]:
        """Its rows."""

    def subset(self, keep: npt.NDArray[np.bool_], note: str | None = None) -> Any:
        """The rows that `keep` marks; `note` says what the others were."""


SourceT = TypeVar("SourceT", bound=KeyedSource)


def without_overlap(train: SourceT, other: KeyedSource, *, drop: bool, but: str) -> SourceT:
    """`train` without rows that are also in `other`: refused unless `drop`.

    Args:
        but: In what rows of one key may differ, for the message, such as ` but for case and punctuation`.

    Raises:
        DataError: There are such rows, and `drop` is false, or no row would be left.
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
