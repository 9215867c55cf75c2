"""Training, held-out and test rows of a run, whatever the rows are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from typing_extensions import NamedTuple


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
