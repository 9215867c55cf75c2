"""How much of a run is done, and what depends on it: learning-rate schedules and everything periodic.

Progress is the share of the run that is done, 0 to 1: the largest share over steps, tokens and wall clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from workbench.config import TrainingSections
from workbench.config.sections.schedule_config import ScheduleConfig
from workbench.data.batching import steps_per_epoch
from workbench.runs.deadline import Deadline


def factor(progress: float, config: ScheduleConfig, *, drops: int = 0) -> float:
    """Learning rate at `progress`, as a share of the peak.

    Every schedule rises from `start` to 1 in the warm-up; its fall from 1 towards 0 is scaled to end at `floor`. With w
    the end of the warm-up and z the share of the fall that is done:
    linear: 1 - z. polynomial: (1 - z) ^ power. cosine: (1 + cos(pi z)) / 2, where z starts again with each of the
    `cycles` (Loshchilov & Hutter 2017). rex: (1 - z) / (1/2 + (1 - z)/2) (Chen et al. 2022). inverse_sqrt:
    sqrt(w / progress), which nears `floor` without reaching it (Vaswani et al. 2017). one_cycle: half a cosine up and
    another down (Smith & Topin 2018). constant: stays. plateau: `drop` ^ drops, at least `floor`. wsd: stays, then
    falls in the last `decay` of the run (Hu et al. 2024), by 1 - z, half a cosine, or 1 - sqrt(z) (Haegele et al.
    2024).

    Args:
        drops: Times that the held-out loss has stalled; see `drop_due`.
    """
    if progress < config.warmup:
        risen = progress / config.warmup
        return config.start + (1 - config.start) * (1 - _cosine(risen) if config.name == "one_cycle" else risen)
    if config.name == "plateau":
        return max(config.dropped**drops, config.floor)
    return config.floor + (1 - config.floor) * _left(progress, config)


def falls_from(config: ScheduleConfig) -> float:
    """Progress from which the learning rate falls; 1 where it never does, or where that is not known beforehand."""
    if config.name in ("constant", "plateau"):
        return 1.0
    return 1 - config.decay if config.name == "wsd" else config.warmup


def drop_due(stalled: int, dropped_at: int, config: ScheduleConfig) -> bool:
    """Whether `plateau` lowers its rate after an evaluation.

    Args:
        stalled: Evaluations since the lowest held-out loss.
        dropped_at: How many these were when it last did; 0 where there was a lower loss since.
    """
    return config.name == "plateau" and stalled - dropped_at >= config.waits


def due(every: int | float | None, *, step: int, before: float, after: float) -> bool:
    """Whether something periodic happens after a step; always after the last one, never where `every` is None.

    Args:
        every: A number of steps, or, as a float, a share of the run.
        step: Counted from 1.
        before: Progress before the step.
        after: Progress after it; 1 where it was the last.
    """
    if every is None:
        return False
    if after >= 1:
        return True
    if isinstance(every, int):
        return step % every == 0
    # A share of 0.1 is due ten times, whatever binary fractions make of it.
    return math.floor(after / every + 1e-9) > math.floor(before / every + 1e-9)


def moments(every: int | float | None, steps: int) -> set[int]:
    """The steps of a run of so many at which something periodic happens; see `due`."""
    return {
        step for step in range(1, steps + 1) if due(every, step=step, before=(step - 1) / steps, after=step / steps)
    }


def _cosine(done: float) -> float:
    return (1 + math.cos(math.pi * done)) / 2


_FALLS: Mapping[str, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "cosine": _cosine,
    "rex": lambda done: 2 * (1 - done) / (2 - done),
    "one_cycle": _cosine,
    "sqrt": lambda done: 1 - math.sqrt(done),
}
"""Rate over peak when a share of the fall is done: from 1 at 0 to 0 at 1."""


def _left(progress: float, config: ScheduleConfig) -> float:
    """Share of the peak rate after the warm-up, before `floor` applies."""
    if config.name == "constant":
        return 1.0
    if config.name == "inverse_sqrt":
        return math.sqrt(config.warmup / progress)
    start = falls_from(config)
    done = min(max((progress - start) / (1 - start), 0.0), 1.0)
    if config.name == "polynomial":
        return math.pow(1 - done, 2.0 if config.power is None else config.power)
    if config.cycles > 1:
        done = _of_cycle(done, config.cycles, config.cycle_growth)
    return _FALLS[config.decay_shape if config.name == "wsd" else config.name](done)


def _of_cycle(done: float, cycles: int, growth: float) -> float:
    """Share of its cycle that is done, where each is `growth` times as long as the one before; 1 at the very end."""
    lengths = [growth**number for number in range(cycles)]
    place, before = done * sum(lengths), 0.0
    for length in lengths:
        if place < before + length * (1 - 1e-12):
            return (place - before) / length if place > before else 0.0
        before += length
    return 1.0


@dataclass(frozen=True)
class Limits:
    """Limits of one adapter's training: the one that is used up first ends it."""

    steps: int | None
    """Optimizer steps; None where neither epochs nor steps limit it."""
    tokens: int | None = None
    """Tokens read in training."""
    deadline: Deadline = field(default_factory=Deadline)

    def share(self, done: float, *, steps: float, tokens: float, part: float) -> float:
        """Share of the run that is done after so many steps and tokens; it never falls.

        Args:
            done: The same before the present step.
            part: Share of the present step that `steps` and `tokens` include.
        """
        of_steps = 0.0 if self.steps is None else steps / self.steps
        of_tokens = 0.0 if self.tokens is None else tokens / self.tokens
        return min(max(done, of_steps, of_tokens, self.deadline.share(done, part)), 1.0)


def limits(config: TrainingSections, rows: int, deadline: Deadline) -> Limits:
    """The limits of a run whose epochs have so many rows."""
    assert deadline.limited or not config.budget.timed, "only a clock can end a run in time"
    return Limits(total_steps(config, rows), config.budget.tokens, deadline)


def total_steps(config: TrainingSections, rows: int) -> int | None:
    """Optimizer steps of a run whose epochs have so many rows; None where only a budget limits it."""
    if config.train.steps is not None:
        return config.train.steps
    epochs = config.train.epochs
    if epochs is None:
        if not config.budget.unlimited:
            return None
        epochs = 1.0
    return max(1, round(epochs * steps_per_epoch(rows, config.batch.size) * config.steps_on_rows))
