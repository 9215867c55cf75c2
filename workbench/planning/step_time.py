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
"""By which a step may take more or less, as a share, besides what the micro-batches that are timed differ by."""
READS = 2
"""So often a micro-batch reads every weight: forward and backward."""

Measure = Callable[[Callable[[], float], float], Measured]
"""Measures with a clock for so many seconds."""


@dataclass(frozen=True)
class StepWork:
    """The micro-batches of an average step on one device, and how to time them."""

    padded: float = 0.0
    """Tokens of its micro-batches, padding included if there is any."""
    tokens: float = 0.0
    """The same without padding."""
    passes: float = 0.0
    """Its micro-batches."""
    weight_bytes: int = 0
    measure: Measure | None = None
    """None: nothing like it can be built here, and operations alone say how long it takes."""
    teacher: bool = False
    """Whether operations of a teacher come on top of those of the model that is timed."""
    forward: float = 0.0
    """Operations of a forward pass without gradients, for each token."""
    looked: float = 0.0
    """Tokens that such passes read in a step, before its gradients."""
    once: float = 0.0
    """Tokens that such passes read before the first step."""


@dataclass(frozen=True)
class Timed:
    """The time of an average step."""

    seconds: float
    low: float
    high: float
    once: float = 0.0
    """Seconds before the first step, in which a model reads rows."""


def work(fit: Training, **others: Any) -> StepWork:
    """The work of an average step of `fit`, which is prepared."""
    steps = list(islice(fit.micro_batches(), STEPS))
    lengths = fit.train.lengths
    return StepWork(
        padded=mean(sum(fit.arrangement.tokens(lengths[rows]) for rows in batches) for batches in steps),
        tokens=mean(sum(int(lengths[rows].sum()) for rows in batches) for batches in steps),
        passes=mean(len(batches) for batches in steps),
        **others,
    )


def timed(
    work: StepWork, flops_per_token: float, *, clock: Callable[[], float] = time.perf_counter, seconds: float = SECONDS
) -> Timed:
    """Seconds of an average step here; never less than its products and weights take at the rates measured."""
    if work.measure is None:
        return assumed(work, flops_per_token)
    measured = work.measure(clock, seconds)
    computing, error = work.padded * measured.token, work.padded * measured.error
    if work.teacher:
        more = max(1.0, work.tokens * flops_per_token / (work.padded * measured.flops))
        computing, error = computing * more, error * more
    reading = measured.token * work.forward / measured.flops
    computing += work.looked * reading
    least = max(
        (work.padded * measured.flops + work.looked * work.forward) / measured.machine.flops,
        work.passes * READS * work.weight_bytes / measured.machine.bandwidth,
    )
    taken = max(computing + measured.update, least)
    error = ERROR * taken + 2 * error
    return Timed(taken, max(least, taken - error), taken + error, work.once * reading)


def assumed(work: StepWork, flops_per_token: float) -> Timed:
    """Seconds of an average step on a usual accelerator, which is not here."""
    least = (work.tokens * flops_per_token + work.looked * work.forward) / ACCELERATOR_FLOPS
    return Timed(least, least, 4 * least, work.once * work.forward / ACCELERATOR_FLOPS)
