"""Gain of arms over a control that trains on every row, at equal rows and at equal compute, over paired seeds.

The control runs at several lengths. At equal compute an arm is compared with the control of as much processor time,
between two of its lengths by the logarithm of the time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import standing

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Arm:
    """Scores and costs of one arm, by seed, the same seeds in all arms."""

    scores: list[float]
    cpu_s: list[float]
    """Processor time of each run, with loading and scoring, which cost every arm the same."""


@dataclass(frozen=True)
class Control:
    """The control at several lengths; 1 is the one that arms are as long as."""

    lengths: Mapping[float, Arm]

    @property
    def fixed_s(self) -> float:
        """Processor time of a run of no step: the line through the shortest and the longest control."""
        (short, least), (long, most) = (
            (length, _median(self.lengths[length])) for length in (min(self.lengths), max(self.lengths))
        )
        return least - short * (most - least) / (long - short)

    def cost(self, arm: Arm) -> float:
        """Processor time of an arm, as a multiple of the control's."""
        return (_median(arm) - self.fixed_s) / (_median(self.lengths[1]) - self.fixed_s)

    def scores_at(self, cost: float) -> Floats | None:
        """Scores of a control of this cost, by seed; None beyond the lengths that ran."""
        known = sorted(self.lengths)
        if not known[0] <= cost <= known[-1]:
            return None
        by_seed = zip(*(self.lengths[length].scores for length in known), strict=True)
        return np.array([np.interp(np.log(cost), np.log(known), scores) for scores in by_seed])


def table(
    control: Control, arms: Mapping[str, Arm], *, references: Mapping[str, str], score: str, sign: int, digits: int
) -> list[list[object]]:
    """Rows of a table with its head.

    Args:
        references: Of arms, another arm with as many rows, at random.
        score: Name of the score.
        sign: 1 where a higher score is better, -1 for a loss: gains are better where positive.
        digits: Of scores and gains.
    """
    head = [score, "cost", "gain over every row, equal rows", "at equal compute", "over as many rows at random"]
    rows: list[list[object]] = [["arm", *head]]
    base = np.asarray(control.lengths[1].scores)
    for length, each in sorted(control.lengths.items()):
        gain = "" if length == 1 else standing.interval(sign * (np.asarray(each.scores) - base), digits=digits)
        steps = "every row" if length == 1 else f"every row, {length:g} times the steps"
        rows.append([steps, f"{np.mean(each.scores):.{digits}f}", f"{control.cost(each):.2f}", gain, "", ""])
    for name, each in arms.items():
        values, cost = np.asarray(each.scores), control.cost(each)
        other = arms[references[name]].scores if name in references else None
        rows.append(
            [
                name,
                f"{values.mean():.{digits}f}",
                f"{cost:.2f}",
                standing.interval(sign * (values - base), digits=digits),
                _gain(values, control.scores_at(max(cost, min(control.lengths))), sign, digits) or "beyond",
                _gain(values, other, sign, digits),
            ]
        )
    return rows


def _gain(values: Floats, others: Sequence[float] | Floats | None, sign: int, digits: int) -> str:
    return "" if others is None else standing.interval(sign * (values - np.asarray(others)), digits=digits)


def _median(arm: Arm) -> float:
    return float(np.median(arm.cpu_s))
