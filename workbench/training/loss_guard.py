"""Whether a step may be taken: a loss that explodes ends a run while its last good checkpoint is still good."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from workbench.data.batching import Indices
from workbench.errors import TrainingError
from workbench.training import checkpoints

if TYPE_CHECKING:
    from workbench.training.adapter_trainer import TrainTask


class LossGuard:
    """Looks at the loss and the gradient's norm of each step of a course."""

    def __init__(self, course: TrainTask) -> None:
        self._course = course
        self._recent: deque[float] = deque(maxlen=20)

    def recall(self, losses: Sequence[float]) -> None:
        """The losses of the steps before a resume."""
        self._recent.extend(losses)

    def __call__(self, loss: float, norm: float, rows: Indices, *, step: int) -> TrainingError | None:
        """What is wrong with a loss that is not finite, or is three times the recent ones and still rising.

        Args:
            rows: Of the step's batch.
            step: Optimizer steps done before it.
        """
        usual = statistics.median(self._recent) if len(self._recent) >= 5 else float("inf")
        if not np.isfinite(loss):
            what = "The loss is not finite"
        elif not np.isfinite(norm):
            what = "The norm of the gradient is not finite"
        elif loss > max(3 * usual, 2.0):
            what = "The loss exploded"
        else:
            self._recent.append(loss)
            return None
        course = self._course
        kept, _ = checkpoints.newest(course.run.checkpoints)
        places = ", ".join(course.train.place(int(row)) for row in rows[:8]) + (", ..." if len(rows) > 8 else "")
        return TrainingError(
            f"{what} at step {step + 1}: loss {loss:.4g}, gradient norm {norm:.4g}, "
            f"median of the last steps {usual:.4g}.\n"
            f"  Rows of the batch: {places}\n"
            f"  Last good checkpoint: {kept or 'none yet'}\n"
            f"  Lower train.learning_rate (now {course.config.train.learning_rate:g}), raise schedule.warmup, "
            "or look at these rows."
        )
