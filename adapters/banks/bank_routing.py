"""The members that the rows of a batch belong to, and where in what a layer reads their rows are.

Legend: B rows, L tokens of each, I inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from workbench.adapters.precision.latest_weight import LatestWeight
from workbench.adapters.row_dropout import of_rows
from workbench.errors import BackboneError


class MemberRows(NamedTuple):
    """Rows of one member."""

    member: str
    many: int
    tokens: int = 0
    """Their tokens together, where rows are packed."""


class RowRun(NamedTuple):
    """Rows beside each other that go one way through a layer."""

    member: str | None
    """Member with a way of its own; None: all others share one."""
    rows: slice
    """Places in the routing."""
    where: slice
    """Places in a dimension of what the layer reads."""


class Routing:
    """The members whose rows are computed; every layer of a bank reads it."""

    def __init__(self, *, pictures: bool) -> None:
        self._rows: tuple[MemberRows, ...] = ()
        self._length: int | None = 1
        self._pictures = pictures
        """Whether rows are pictures: their patches stand together in any number, in windows, fewer in each stage."""
        self.latest = LatestWeight()
        """The quantised weight that several members multiply with, between one batch and the next."""

    def set(self, rows: Sequence[MemberRows], *, length: int | None) -> None:
        """The rows of the next batches, in their order, of `length` tokens each; None: packed into one sequence."""
        self.latest.clear()
        self._rows, self._length = tuple(rows), length

    def set_all(self, member: str) -> None:
        """All rows of the next batches are one member's, however many there are."""
        self._rows, self._length = (MemberRows(member, -1),), 1

    @property
    def is_packed(self) -> bool:
        """Whether the rows lie one after another in one sequence."""
        return self._length is None

    @property
    def count(self) -> int:
        """Rows of the next batches; negative where any number may come."""
        return sum(each.many for each in self._rows)

    def slices(self, x: Tensor) -> Iterator[tuple[str, slice]]:
        """Each member, and where in the first dimension of `x` (B, ...) or (B * L, ...) its rows are.

        Raises:
            BackboneError: `x` holds neither, so that nobody can tell whose it is.
        """
        if not self._rows:
            raise RuntimeError("a bank computes inside `with bank.route(...)` or `with bank.only(...)`")
        if self._rows[0].many < 0:
            yield self._rows[0].member, slice(0, len(x))
            return
        rows = self.count
        tokens, rest = divmod(len(x), rows)
        if rest or not (self._pictures or tokens in (1, self._length)):
            raise self._unknown(len(x))
        start = 0
        for each in self._rows:
            stop = start + each.many * tokens
            yield each.member, slice(start, stop)
            start = stop

    def token_slices(self, x: Tensor) -> Iterator[tuple[str, slice]]:
        """Each member, and which of all tokens of `x` (..., I) are its rows'. Raises as `slices` does."""
        tokens = x[..., 0].numel()
        if not self.is_packed:
            per = tokens // len(x)  # in one element of the first dimension
            for member, where in self.slices(x):
                yield member, slice(where.start * per, where.stop * per)
            return
        of_rows = tokens == self.count  # where only the first token of each goes on
        if not of_rows and tokens != sum(each.tokens for each in self._rows):
            raise self._unknown(tokens)
        start = 0
        for each in self._rows:
            stop = start + (each.many if of_rows else each.tokens)
            yield each.member, slice(start, stop)
            start = stop

    def runs(self, x: Tensor, own: Collection[str]) -> tuple[int, list[RowRun]]:
        """The dimension of `x` that rows follow one another in, and the ways that they go. Raises as `slices` does.

        Args:
            own: Members whose rows go a way of their own.
        """
        in_sequence = self.is_packed and x.ndim > 2 and len(x) == 1
        places = self.token_slices(x) if self.is_packed else self.slices(x)
        runs: list[RowRun] = []
        for number, (name, where) in enumerate(places):
            member = name if name in own else None
            rows = slice(number, number + 1)
            if runs and member is None and runs[-1].member is None:
                last = runs.pop()
                rows, where = slice(last.rows.start, rows.stop), slice(last.where.start, where.stop)
            runs.append(RowRun(member, rows, where))
        return int(in_sequence), [run for run in runs if run.where.stop > run.where.start]

    @contextmanager
    def within(self, run: RowRun) -> Iterator[None]:
        """Inside, these rows compute alone."""
        rows = self._rows
        if rows[0].many < 0 or run.rows == slice(0, len(rows)):
            yield
            return
        row, token = (
            [0, *accumulate(sizes)] for sizes in zip(*((each.many, each.tokens) for each in rows), strict=True)
        )
        first, last = run.rows.start, run.rows.stop
        own_rows, own_tokens = slice(row[first], row[last]), slice(token[first], token[last])
        self._rows = rows[run.rows]
        try:
            with of_rows(own_rows, own_tokens, count=row[-1], total=token[-1]):
                yield
        finally:
            self._rows = rows

    def _unknown(self, tokens: int) -> BackboneError:
        known = f"with {self._length} tokens each" if self._length else f"of {sum(each.tokens for each in self._rows)}"
        return BackboneError(
            f"A layer sees {tokens} tokens of {self.count} rows {known}: it chooses among tokens, as experts do, and "
            "a bank cannot tell whose they are. Leave it out of adapter.targets, or write folds.together=false or "
            "sweep.together=false."
        )
