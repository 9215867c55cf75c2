"""How fast the machine is, as the training steps and evaluations of a run tell it."""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

NEAR = 3.0
"""Steps of so many seconds around a moment say how fast the machine was then."""
FEW, MOST = 5, 15
"""At least so many, and at most; the last FEW also say what a step takes."""


class EvaluationTime(NamedTuple):
    """An evaluation in training: the same work each time."""

    at: float
    """When, in seconds of the run."""
    seconds: float
    pace: float | None = None
    """Of the steps around it, where an earlier process did them."""


class Pace:
    """Durations of steps and evaluations, and when they took place.

    Args:
        state: What `state` gave at the end of an earlier process.
    """

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        self._moments: list[float] = []
        """When each step of this process ended."""
        self._lengths: list[float] = []
        self._paces: list[float] = []
        """Seconds a token of each."""
        self._sums = [(0.0, 0)]
        """Seconds and tokens of all steps before each, and of all."""
        self._before: float | None = state["step_s"] if state else None
        self._evaluations = [EvaluationTime(*found) for found in state["evaluations"]] if state else []

    def stepped(self, at: float, *, seconds: float, tokens: int) -> None:
        """A step of so many tokens ended at a moment."""
        self._moments.append(at)
        self._lengths.append(seconds)
        self._paces.append(seconds / tokens)
        self._sums.append((self._sums[-1][0] + seconds, self._sums[-1][1] + tokens))

    def evaluated(self, at: float, *, seconds: float) -> None:
        """An evaluation was done."""
        self._evaluations.append(EvaluationTime(at, seconds))

    @property
    def usual(self) -> float | None:
        """Usual duration of a step; None where none was done."""
        return statistics.median(self._lengths[-FEW:]) if self._lengths else self._before

    @property
    def longest(self) -> float | None:
        """Longest duration of a step; None where none was done."""
        return max(self._lengths[-FEW:]) if self._lengths else self._before

    def per_token(self, at: float) -> float | None:
        """Seconds a token of the steps around a moment; None where this process did no step."""
        count = len(self._paces)
        if not count:
            return None
        low, middle, high = (bisect.bisect(self._moments, at + side, hi=count) for side in (-NEAR, 0.0, NEAR))
        wanted = min(max(high - low, FEW), MOST)
        first = max(0, min(middle - wanted // 2, count - wanted))
        return statistics.median(self._paces[first : first + wanted])

    def lately(self, now: float, seconds: float) -> float | None:
        """Seconds a token over all steps of the last `seconds`: what to expect of the next ones."""
        count = len(self._paces)
        if not count:
            return None
        first = max(0, min(bisect.bisect(self._moments, now - seconds, hi=count), count - FEW))
        return (self._sums[count][0] - self._sums[first][0]) / (self._sums[count][1] - self._sums[first][1])

    def slowness(self, at: float, *, steady: bool, lately: float | None = None) -> float | None:
        """A number that the time of the same work at a moment is proportional to; None where nothing tells it.

        The steps tell it. Where they do not stay the same work, evaluations are believed from the first to the last of
        them, and the steps only before and after.

        Args:
            steady: Whether all steps of the run are the same work.
            lately: Instead of that of a moment, the mean of so many seconds before it.
        """
        pace = self.per_token(at) if lately is None else self.lately(at, lately)
        earlier = [found for found in self._evaluations if found.at <= at]
        if pace is None or steady or not earlier:
            return pace
        first, last = earlier[0], earlier[-1]
        return pace / self._beside(last) * last.seconds / first.seconds * self._beside(first)

    def state(self) -> dict[str, Any]:
        """State that a later process needs, as JSON."""
        evaluations = self._evaluations[:1] + self._evaluations[-1:]
        told = [found._replace(pace=found.pace or self.per_token(found.at)) for found in evaluations]
        return {"step_s": self.usual, "evaluations": told}

    def _beside(self, found: EvaluationTime) -> float:
        """Seconds a token of the steps around an evaluation."""
        pace = found.pace or self.per_token(found.at)
        assert pace is not None, "a step was done, or nobody asks"
        return pace
