"""How much of a run is done: the largest share over steps, tokens and wall clock, whichever is used up first."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.config import RunConfig
from workbench.data.batching import steps_per_epoch
from workbench.runs.timing import Timer


@dataclass(frozen=True)
class Limits:
    """Limits of one adapter's training."""

    steps: int | None
    """Optimizer steps; None where epochs and steps do not limit it."""
    tokens: int | None = None
    """Tokens read in training."""
    timer: Timer | None = None

    def share(self, *, steps: float, tokens: float, ahead: float) -> float:
        """Share of the run that is done after so many steps and tokens, the last `ahead` of these steps yet to come."""
        shares = [
            0.0 if self.steps is None else steps / self.steps,
            0.0 if self.tokens is None else tokens / self.tokens,
            0.0 if self.timer is None else self.timer.share(ahead=ahead),
        ]
        return min(max(shares), 1.0)


def limits(config: RunConfig, draws: int, timer: Timer | None = None) -> Limits:
    """The limits of a run whose epochs draw so many rows."""
    assert timer is not None or not config.budget.timed, "only a timer can end a run in time"
    return Limits(total_steps(config, draws), config.budget.tokens, timer)


def total_steps(config: RunConfig, draws: int) -> int | None:
    """Optimizer steps of a run whose epochs draw so many rows; None where a budget alone limits it."""
    if config.train.steps is not None:
        return config.train.steps
    epochs = config.train.epochs
    if epochs is None:
        if not config.budget.unlimited:
            return None
        epochs = 1.0
    return max(1, round(epochs * steps_per_epoch(draws, config.batch.size)))
