"""How much of a run is done: the largest share over steps, tokens and wall clock, whichever is used up first."""

from __future__ import annotations

from dataclasses import dataclass, field

from workbench.config import TrainingSections
from workbench.data.batching import steps_per_epoch
from workbench.runs.deadline import Deadline


@dataclass(frozen=True)
class Limits:
    """Limits of one adapter's training."""

    steps: int | None
    """Optimizer steps; None where epochs and steps do not limit it."""
    tokens: int | None = None
    """Tokens read in training."""
    deadline: Deadline = field(default_factory=Deadline)

    def share(self, done: float, *, steps: float, tokens: float, part: float) -> float:
        """Share of the run that is done after so many steps and tokens; it never falls.

        Args:
            done: The same before the step whose gradients are there.
            part: Share of that step which these steps and tokens count.
        """
        shares = [
            done,
            0.0 if self.steps is None else steps / self.steps,
            0.0 if self.tokens is None else tokens / self.tokens,
            self.deadline.share(done, part),
        ]
        return min(max(shares), 1.0)


def limits(config: TrainingSections, draws: int, deadline: Deadline) -> Limits:
    """The limits of a run whose epochs draw so many rows."""
    assert deadline.limited or not config.budget.timed, "only a clock can end a run in time"
    return Limits(total_steps(config, draws), config.budget.tokens, deadline)


def total_steps(config: TrainingSections, draws: int) -> int | None:
    """Optimizer steps of a run whose epochs draw so many rows; None where a budget alone limits it."""
    if config.train.steps is not None:
        return config.train.steps
    epochs = config.train.epochs
    if epochs is None:
        if not config.budget.unlimited:
            return None
        epochs = 1.0
    return max(1, round(epochs * steps_per_epoch(draws, config.batch.size) * config.steps_on_rows))
