"""The rows of each optimizer step: a function of the rows, the settings and the step alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from workbench.config import TrainingSections
from workbench.config.sections.curriculum_config import CurriculumConfig
from workbench.data.batching import Examples, Indices, Weights, global_batch, steps_per_epoch
from workbench.errors import DataError


class PacedStep(NamedTuple):
    """A step of a curriculum."""

    rows: Indices
    opened: int
    """Rows that it was drawn among: those open by then."""


@dataclass(frozen=True)
class RowOrder:
    """Rows of every step of a training, as far as they are known before it.

    Args:
        steps: Optimizer steps of the run; None where a budget alone ends it.

    Raises:
        DataError: No row is easier than another, for a curriculum.
    """

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
    """Rows of each of so many steps: the last one of each pass takes what is left of it."""
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
