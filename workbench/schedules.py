"""Learning-rate schedules as pure functions of progress: the share of the run that is done, 0 to 1."""

from __future__ import annotations

import math

from workbench.config import ScheduleConfig


def factor(progress: float, config: ScheduleConfig) -> float:
    """Learning rate at `progress`, as a share of the peak.

    linear: falls linearly to `floor`. cosine: half a cosine to `floor` (Loshchilov & Hutter 2017).
    constant: stays. wsd: stays, then falls linearly to `floor` in the last `decay` of the run (Hu et al. 2024).
    """
    if progress < config.warmup:
        return progress / config.warmup
    if config.name == "constant":
        return 1.0
    start = 1 - config.decay if config.name == "wsd" else config.warmup
    fallen = min(max((progress - start) / (1 - start), 0.0), 1.0)
    shape = (1 + math.cos(math.pi * fallen)) / 2 if config.name == "cosine" else 1 - fallen
    return config.floor + (1 - config.floor) * shape
