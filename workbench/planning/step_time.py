"""Seconds of an average step: its micro-batches and the optimizer's step added up, with an interval."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from statistics import mean
from typing import Any

from workbench.planning.block_time import SECONDS, Measured
from workbench.planning.dry_trainings import Training

ACCELERATOR_FLOPS = 1e14
"""Operations a second of a usual accelerator that is not here."""
STEPS = 500
"""Steps of which the micro-batches are known; those after them are alike."""
ERROR = 0.15
"""By which a step may take more or less, as a share, where nobody disturbs."""

Measure = Callable[[Callable[[], float], float], Measured]
"""Measures with a clock for so many seconds."""


@dataclass(frozen=True)
class StepWork:
    """The micro-batches of an average step on one device, and how to time them."""

    padded: float = 0.0
    """Tokens of its micro-batches, padding included."""
    tokens: float = 0.0
    """The same without padding."""
    measure: Measure | None = None
    """None: nothing like it can be built here, and operations alone say how long it takes."""
    teacher: bool = False
    """Whether operations of a teacher come on top of those of the model that is timed."""


@dataclass(frozen=True)
class Timed:
    """The time of an average step."""

    seconds: float
    low: float
    high: float


def work(fit: Training, **others: Any) -> StepWork:
    """The work of an average step of `fit`, which is prepared."""
    padded, tokens = [], []
    for batches in islice(fit.micro_batches(), STEPS):
        padded.append(sum(len(rows) * int(fit.train.lengths[rows].max()) for rows in batches))
        tokens.append(sum(int(fit.train.lengths[rows].sum()) for rows in batches))
    return StepWork(mean(padded), mean(tokens), **others)


def timed(
    found: StepWork, flops_per_token: float, *, clock: Callable[[], float] = time.perf_counter, seconds: float = SECONDS
) -> Timed:
    """Seconds of an average step here; never less than its products take at the rate that was measured."""
    if found.measure is None:
        return assumed(found, flops_per_token)
    measured = found.measure(clock, seconds)
    taken = found.padded * (measured.block + measured.rest)
    if found.teacher:
        taken *= max(1.0, found.tokens * flops_per_token / (found.padded * measured.flops))
    taken += measured.update
    error = ERROR + measured.spread
    least = found.padded * measured.flops / measured.rate
    taken = max(taken, least)
    return Timed(taken, max(least, taken * (1 - error)), taken * (1 + error))


def assumed(found: StepWork, flops_per_token: float) -> Timed:
    """Seconds of an average step on a usual accelerator, which is not here."""
    least = found.tokens * flops_per_token / ACCELERATOR_FLOPS
    return Timed(least, least, 4 * least)
