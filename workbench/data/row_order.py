"""The rows of each optimizer step: a function of the rows, the settings and the step alone.

A curriculum opens rows by their difficulty, which their file or a user's function gives.

Legend: N rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from workbench.config import TrainingSections, plugins
from workbench.config.sections.curriculum_config import CurriculumConfig
from workbench.data.batching import Examples, Indices, Weights, global_batch, steps_per_epoch
from workbench.data.rows import RawRow, excerpt, finite
from workbench.errors import ConfigError, DataError
from workbench.schema import did_you_mean

Floats: TypeAlias = npt.NDArray[np.float64]
KEY = "data.curriculum"


def row_difficulty(config: CurriculumConfig, rows: Iterable[RawRow]) -> Floats:
    """Difficulty (N,) of rows as they stand in their file, for by=column and by=function. Raises ConfigError: the
    user's file is wrong, or says no number; DataError: a row has no number in the column."""
    if config.by == "column":
        assert config.column is not None
        column = config.column
        return np.asarray([_number_in(row, column) for row in rows], dtype=np.float64)
    return np.asarray(list(_judged(config, rows)), dtype=np.float64)


def random_difficulty(rows: int, *, seed: int) -> Floats:
    """Stands in for a difficulty that only a run can measure: different for all rows, and without meaning."""
    return np.random.default_rng([seed, 10]).permutation(rows).astype(np.float64)


def _number_in(row: RawRow, column: str) -> float:
    if column not in row.columns:
        known = list(row.columns)
        raise DataError(f"{row.place}: {KEY}.column: the row has no `{column}`.{did_you_mean(column, known)}")
    value = row.columns[column]
    if (number := _finite(value)) is None:
        raise DataError(
            f"{row.place}: `{column}` is to say how difficult the row is, and is {excerpt(value)}. Write a number."
        )
    return number


def _judged(config: CurriculumConfig, rows: Iterable[RawRow]) -> Iterable[float]:
    """Difficulty of each row by the user's function, which must say the same of the same row."""
    path, key = config.function, f"{KEY}.function"
    assert path is not None
    signature = "def difficulty(row: dict[str, Any]) -> float"
    judge: Callable[..., Any] = plugins.function(path, "difficulty", signature, key=key)

    def judged(row: RawRow) -> float:
        try:
            value = judge(dict(row.columns))
        except Exception as error:  # a user's code may raise anything
            raise plugins.failed(path, error, key=f"{key}, called with {row.place}") from error
        if (number := _finite(value)) is None:
            raise ConfigError(
                f"{key}: difficulty() of {path}, called with {row.place}, returned {excerpt(value)}. Return a number."
            )
        return number

    every = iter(rows)
    for first in itertools.islice(every, 1):
        if (number := judged(first)) != judged(first):
            raise ConfigError(
                f"{key}: difficulty() of {path}, called twice with {first.place}, returned two numbers. "
                "Derive randomness from the row alone."
            )
        yield number
    yield from map(judged, every)


def _finite(value: Any) -> float | None:
    """A number; None where it is none, or none that has a place in an order. Text of a csv file may be one."""
    if isinstance(value, bool) or not isinstance(value, int | float | str | np.integer | np.floating):
        return None
    return finite(value)


class PacedStep(NamedTuple):
    """A step of a curriculum."""

    rows: Indices
    opened: int  # rows that it was drawn among: those open by then


@dataclass(frozen=True)
class RowOrder:
    """Rows of every step of a training, as far as they are known before it. Raises DataError: no row is easier than
    another, for a curriculum. `steps`: optimizer steps of the run; None where a budget alone ends it."""

    train: Examples
    config: TrainingSections
    steps: int | None

    def __post_init__(self) -> None:
        if not self._paces:
            return
        assert self.steps is not None, "a curriculum with a budget alone is refused"
        difficulty_N = self._difficulty
        if difficulty_N.min() == difficulty_N.max():
            by, measure = self._curriculum.by, self._curriculum.measure
            raise DataError(
                f"data.curriculum.by={by}: all {len(difficulty_N):,} training rows have the same {measure} "
                f"({difficulty_N[0]:g}), so that none is easier.\n  Leave data.curriculum out."
            )

    @property
    def typical_steps(self) -> range:
        """Steps that are like all others of the run: those of one pass, or where rows open, all."""
        return range(self.steps if self._paces and self.steps is not None else self.steps_per_epoch)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one pass over the rows."""
        return steps_per_epoch(len(self.train), self.config.batch.size) * self.config.steps_on_rows

    def epoch(self, step: int) -> int:
        """The pass over the rows that step `step` (from 0) belongs to."""
        return step // self.steps_per_epoch

    def ahead(self, step: int) -> Indices:
        """The same as `rows`: nothing that happens until then changes them."""
        return self.rows(step)

    def rows(self, step: int) -> Indices:
        """Rows of step `step` (from 0); a curriculum has none of its own beyond the last step."""
        if self._paces:
            return self._paced_step(step).rows
        size, seed = self.config.batch.size, self.config.seed
        draws = global_batch(step // self.config.steps_on_rows, rows=len(self.train), size=size, seed=seed)
        return self.train.sample(draws, epoch=self.epoch(step))

    def metrics(self, step: int) -> dict[str, float]:
        """Figures on step `step` (from 0) for metrics.jsonl: the share of the rows that a curriculum has opened."""
        return {"open_share": self._paced_step(step).opened / len(self.train)} if self._paces else {}

    def _paced_step(self, step: int) -> PacedStep:
        return self._paced[min(step, len(self._paced) - 1)]

    @cached_property
    def _paced(self) -> Sequence[PacedStep]:
        """All steps of a curriculum."""
        assert self.steps is not None
        order_N = np.argsort(self._difficulty * self._curriculum.direction, kind="stable")
        sizes = step_sizes(len(self.train), self.config.batch.size, self.steps)
        return list(paced(order_N, sizes, self._curriculum.open_share, seed=self.config.seed))

    @property
    def _curriculum(self) -> CurriculumConfig:
        return self.config.data.curriculum

    @property
    def _paces(self) -> bool:
        """Whether rows open by a difficulty that is known before the training."""
        return self._curriculum.by not in ("none", "self_paced")

    @property
    def _difficulty(self) -> Weights:
        """Difficulty of each row."""
        if not self._curriculum.graded:
            return self.train.lengths
        assert self.train.difficulty is not None, "whoever reads the rows asks for their difficulty"
        return self.train.difficulty


def step_sizes(rows: int, size: int, steps: int) -> list[int]:
    """Rows of each of `steps` steps; the last step of each pass takes what is left."""
    passes = steps_per_epoch(rows, size)
    last = rows - size * (passes - 1)
    return [last if (step + 1) % passes == 0 else size for step in range(steps)]


def paced(rows_N: Indices, sizes: Sequence[int], share: Callable[[float], float], *, seed: int) -> Iterator[PacedStep]:
    """Yield the rows of each step of a run that opens rows in the order of `rows_N`.

    A deck has one card for each time that a row is to be drawn in the whole run. The cards of open rows lie in it, and
    each step draws evenly from these, so that a row comes as often as without an order: once for each whole pass, and
    for a part of a pass at most once more. Where the open rows have no cards left for a step, more are opened.

    Args:
        rows_N: Row numbers, those that are open first in front.
        sizes: Rows of each step.
        share: Share of the rows that is open after a share of the run.
    """
    generator = np.random.default_rng([seed, 5])
    total, count = sum(sizes), len(rows_N)
    cards_N = _dealt(count, total, generator)
    until_N = np.concatenate([[0], np.cumsum(cards_N)])  # cards of the first n rows
    deck, drawn, opened = np.empty(total, dtype=np.int64), 0, 0
    for size in sizes:
        asked = round(share(drawn / total) * count)
        needed = int(np.searchsorted(until_N, drawn + size))
        wanted = max(opened, min(count, max(asked, needed)))
        filled = int(until_N[opened]) - drawn
        new = np.repeat(rows_N[opened:wanted], cards_N[opened:wanted])
        deck[filled : filled + len(new)] = new
        filled, opened = filled + len(new), wanted
        chosen = generator.choice(filled, size, replace=False)
        yield PacedStep(deck[chosen], opened)
        kept = filled - size  # the last cards fill the gaps
        deck[chosen[chosen < kept]] = np.delete(deck[kept:filled], chosen[chosen >= kept] - kept)
        drawn += size


def draws_of_rows(count: int, total: int, *, seed: int) -> Indices:
    """How often each of `count` rows is drawn in a run that draws `total`: once for each whole pass, some once more."""
    return _dealt(count, total, np.random.default_rng([seed, 5]))


def _dealt(count: int, total: int, generator: np.random.Generator) -> Indices:
    passes, rest = divmod(total, count)
    draws_N: Indices = np.full(count, passes)
    draws_N[generator.permutation(count)[:rest]] += 1
    return draws_N
