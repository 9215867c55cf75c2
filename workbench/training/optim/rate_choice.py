"""Choice of a learning rate from short trainings that differ only in it (`workbench lr`).

All trainings start from the same values and see the same rows in the same steps. Losses are compared step by step, so
that the noise of rows, which is far larger than the effect of the rate, cancels.

Legend: K rates, S steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

LATE = 0.5
"""Share of the steps, at the end, whose losses are compared."""
CONFIDENCE = 0.95
TOLERANCE = 0.01
"""A rate whose mean loss exceeds the lowest by more than this share is worse, however noisy the difference."""


@dataclass(frozen=True)
class TriedRate:
    """A learning rate, and the result of its training."""

    rate: float
    losses: tuple[float, ...]
    """Losses of its steps; a training that exploded has fewer."""
    mean: float | None
    """Mean loss of the late steps; None where the training did not reach its end."""
    excess: float | None
    """Mean difference of the late steps from those of the best rate, in nats."""
    error: float | None
    """Half of the 95 % interval of `excess`, over steps."""
    alike: bool
    """Whether it is as good as the best rate, within noise."""


@dataclass(frozen=True)
class RateChoice:
    """The rates in rising order, and which of them are as good as the best."""

    tried: tuple[TriedRate, ...]
    best: TriedRate
    """The one with the lowest mean loss."""
    lowest: TriedRate
    """The smallest of the rates around the best one that are as good."""
    highest: TriedRate
    """The largest of these."""
    steps: int
    """Steps of each training."""
    late: int
    """Number of steps whose losses are compared."""

    def suggested(self, whole: int | None) -> float:
        """The geometric mean of the rates that are as good, in two digits, lowered for a run of `whole` steps.

        It is divided by the root of how much longer that run is, as the best rate of stochastic gradient descent falls
        with the number of steps (Zinkevich 2003, theorem 1); not where that is unknown (None).
        """
        middle = math.sqrt(self.lowest.rate * self.highest.rate)
        return float(f"{middle * self.lowered(whole):.1e}")

    def lowered(self, whole: int | None) -> float:
        """Factor on the rate for a run of `whole` steps."""
        return 1.0 if whole is None else min(1.0, math.sqrt(self.steps / whole))


def choose(rates: Sequence[float], losses: Sequence[Sequence[float]], *, steps: int) -> RateChoice | None:
    """The best rate, and the rates around it that are as good, with no worse one between.

    A rate is as good where the 95 % interval of its difference over steps contains 0 and the difference is below
    TOLERANCE of the lowest loss.

    Args:
        rates: In ascending order.
        losses: Losses of each rate's steps.
        steps: Of a training that reached its end.

    Returns:
        None where no training reached its end.
    """
    late = max(2, round(LATE * steps))
    ended = {number: np.asarray(own[-late:]) for number, own in enumerate(losses) if len(own) == steps}
    ended = {number: own for number, own in ended.items() if np.isfinite(own).all()}
    if not ended:
        return None
    best = min(ended, key=lambda number: float(ended[number].mean()))
    tried = tuple(
        _judged(rate, own, ended.get(number), ended[best])
        for number, (rate, own) in enumerate(zip(rates, losses, strict=True))
    )
    high = low = best
    while high + 1 < len(tried) and tried[high + 1].alike:
        high += 1
    while low > 0 and tried[low - 1].alike:
        low -= 1
    return RateChoice(tried, best=tried[best], lowest=tried[low], highest=tried[high], steps=steps, late=late)


def _judged(
    rate: float,
    losses: Sequence[float],
    late: np.ndarray[tuple[int], np.dtype[np.float64]] | None,
    best: np.ndarray[tuple[int], np.dtype[np.float64]],
) -> TriedRate:
    if late is None:
        return TriedRate(rate, tuple(losses), mean=None, excess=None, error=None, alike=False)
    apart = late - best
    excess = float(apart.mean())
    error = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(apart) - 1) * apart.std(ddof=1) / len(apart) ** 0.5)
    alike = excess <= min(error, TOLERANCE * float(best.mean()))
    return TriedRate(
        rate, tuple(losses), mean=float(late.mean()), excess=excess, error=error, alike=alike or late is best
    )
