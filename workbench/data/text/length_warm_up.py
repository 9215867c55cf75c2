"""Rows of text that are cut to a length that grows with the steps of a run (Li, Zhang and He 2022, arXiv:2108.06084).

Legend: N rows, T tokens of some rows, one after another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from workbench.config.sections.curriculum_config import LengthWarmUpConfig
from workbench.data.batching import Examples, Indices, MicroBatch, Row
from workbench.data.resampling import ResampledRows
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.errors import DataError

KEY = "data.length_warm_up"


@dataclass(frozen=True, eq=False)
class GrowingRows(ResampledRows[TokenizedSet]):
    """Rows that a step reads only the first tokens of, as many as the section says; a function of the step alone.

    Tokens that are cut are neither read nor predicted, and a step's loss is the mean over those that are left.
    """

    warm_up: LengthWarmUpConfig
    steps: int  # optimizer steps of the run
    limit: int | None = None  # tokens of a row that are read; None: all
    _views: dict[int, Self] = field(default_factory=dict)  # the last views by their limits

    def seen(self, *, epoch: int, step: int, steps: int | None = None) -> Self:
        """The rows as long as step `step` reads them."""
        limit = self.warm_up.limit(step, steps=self.steps, longest=self.longest)
        if limit is None:
            return self
        if limit not in self._views:
            for known in [each for each in self._views if each < limit][:-1]:
                del self._views[known]
            self._views[limit] = replace(self, limit=limit, _views={})
        return self._views[limit]

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return int(self.rows.lengths.max())

    @cached_property
    def lengths(self) -> Indices:
        """Tokens of each row that are read."""
        token_counts: Indices = self.rows.lengths if self.limit is None else np.minimum(self.rows.lengths, self.limit)
        return token_counts

    @cached_property
    def supervised(self) -> Indices:
        """Tokens of each row that are predicted."""
        if self.limit is None:
            return self.rows.supervised
        found_N: Indices = self.rows.supervised.copy()
        for part in _spans(self.rows):
            end = np.minimum(part.start + self.limit, part.end)
            found_N[part.rows] = part.before_T[end] - part.before_T[part.start + 1]
        return found_N

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        """The rows `indices`, cut and padded."""
        rows = [self.rows[int(index)] for index in indices]
        cut = [Row(row.input_ids[: self.limit], row.supervised[: self.limit], row.source, row.digest) for row in rows]
        return replace(self.rows.collate(cut, epoch=epoch), rows_B=indices)


class _RowSpans(NamedTuple):
    """Rows that lie together in a table."""

    rows: Indices  # their numbers in the set (n,)
    start: Indices
    end: Indices  # where their tokens begin and end (n,)
    before_T: Indices  # tokens that carry loss before each place (T + 1,)


def growing(rows: TokenizedSet, config: LengthWarmUpConfig, steps: int | None) -> TokenizedSet | GrowingRows:
    """The rows as the section cuts them; `rows` themselves where it is off. Raises DataError: they cannot be cut to the
    first length: none would be cut, or one would lose all that carries loss."""
    if config.start is None:
        return rows
    assert steps is not None, "a warm-up with a budget alone is refused"
    growing_rows = GrowingRows(rows, config, steps)
    start = config.start
    rows = growing_rows.rows
    if rows[0].source:
        raise DataError(f"{KEY} cuts one text, and the rows of an encoder-decoder have two.\n  Leave {KEY} out.")
    if start >= growing_rows.longest:
        raise DataError(
            f"{KEY}.start={start}: the longest training row has {growing_rows.longest:,} tokens, so that none is cut.\n"
            f"  Write a smaller start, or leave {KEY} out."
        )
    needed_N = np.zeros(len(rows), dtype=np.int64)  # tokens up to the first that is predicted, itself included
    for part in _spans(rows):
        place = np.searchsorted(part.before_T, part.before_T[part.start + 1], side="right")
        needed_N[part.rows] = place - part.start
    if (short_N := needed_N > start).any():
        most = int(needed_N.max())
        raise DataError(
            f"{KEY}.start={start} would cut all that carries loss off {int(short_N.sum()):,} of {len(rows):,} training "
            f"rows, such as {rows.place(int(needed_N.argmax()))}, whose first such token is number {most:,}: answers "
            f"stand at the end of rows.\n  Write {KEY}.start={most} or more, or leave {KEY} out."
        )
    return growing_rows


def in_words(rows: Examples) -> list[str]:
    """Sentence on what the first step reads; none where it reads all."""
    if not isinstance(rows, GrowingRows) or (first := rows.seen(epoch=0, step=0)) is rows:
        return []
    read = first.supervised.sum() / rows.rows.supervised.sum()
    cut = float((rows.rows.lengths > first.lengths).mean())
    return [
        f"Length warm-up: the first step reads the first {first.limit:,} tokens of a row, which cuts {cut:.0%} of the "
        f"rows and leaves {read:.0%} of the tokens that carry loss; rows are whole after "
        f"{rows.warm_up.until:.0%} of the run, of up to {rows.longest:,} tokens."
    ]


def _spans(rows: TokenizedSet) -> Iterator[_RowSpans]:
    """Yield all rows, as they lie in the chunks of their table."""
    order = np.argsort(rows.rows, kind="stable")
    number_N, first = rows.rows[order], 0
    for chunk in rows.table.data.column("supervised").chunks:
        low, high = np.searchsorted(number_N, [first, first + len(chunk)])
        offsets = chunk.offsets.to_numpy().astype(np.int64) - chunk.offsets[0].as_py()
        marked_T: npt.NDArray[np.bool_] = chunk.flatten().to_numpy(zero_copy_only=False)
        before_T = np.concatenate([[0], np.cumsum(marked_T, dtype=np.int64)])
        inside = number_N[low:high] - first
        yield _RowSpans(order[low:high], offsets[inside], offsets[inside + 1], before_T)
        first += len(chunk)
