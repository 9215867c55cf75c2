"""Guards a run against a loss that explodes, while the last good checkpoint is still good."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from workbench.data.batching import Examples, Indices
from workbench.errors import TrainingError
from workbench.training import checkpoints


class LossGuard:
    """Refuses a step whose loss or gradient is not finite, or whose loss exploded.

    Args:
        rows: The training examples, to name those of a refused batch.
        kept: Folder of the checkpoints.
        learning_rate: The peak learning rate, to suggest a lower one.
    """

    def __init__(self, rows: Examples, *, kept: Path, learning_rate: float) -> None:
        self._rows, self._kept, self._learning_rate = rows, kept, learning_rate
        self._recent: deque[float] = deque(maxlen=20)

    def recall(self, losses: Sequence[float]) -> None:
        """The losses of the steps before a resume."""
        self._recent.extend(losses)

    def __call__(self, loss: float, norm: float, rows: Indices, *, step: int) -> TrainingError | None:
        """An error for a loss that is not finite, or is three times the recent ones; None where the step may be taken.

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
        kept, _ = checkpoints.newest(self._kept)
        places = ", ".join(self._rows.place(int(row)) for row in rows[:8]) + (", ..." if len(rows) > 8 else "")
        return TrainingError(
            f"{what} at step {step + 1}: loss {loss:.4g}, gradient norm {norm:.4g}, "
            f"median of the last steps {usual:.4g}.\n"
            f"  Rows of the batch: {places}\n"
            f"  Last good checkpoint: {kept or 'none yet'}\n"
            f"  Lower train.learning_rate (now {self._learning_rate:g}), raise schedule.warmup, "
            "or look at these rows."
        )
