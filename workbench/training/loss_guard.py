"""Loss guard: stops a run whose loss explodes or is not finite, before its checkpoints are overwritten."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from workbench.data.batching import Examples, Indices
from workbench.errors import TrainingError
from workbench.training import checkpoints

RECENT, FIRST = 20, 5
"""Latest steps whose median is the usual loss, and first steps whose median is the loss of a fresh model."""


def comparable(records: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Loss and supervised tokens of the last lines of metrics.jsonl that have as many blocks as the very last one."""
    same = takewhile(lambda record: record.get("blocks") == records[-1].get("blocks"), reversed(records))
    return [(record["loss"], record["supervised_tokens"]) for record in same][::-1]


class LossGuard:
    """Refuses a step whose loss or gradient is not finite, or whose loss exploded.

    An exploded loss is above 2, above three times the usual one, and above 1.5 times that of the fresh model: near the
    end of a run, one hard row may multiply the loss of a small batch without harm. A mean of n tokens varies as
    1 / sqrt(n), so that the last batch of an epoch, which may hold a single row, is allowed as much more.

    Args:
        rows: The training examples, to name those of a refused batch.
        checkpoints_folder: Named in the error.
        learning_rate: The peak learning rate, to suggest a lower one.
    """

    def __init__(self, rows: Examples, *, checkpoints_folder: Path, learning_rate: float) -> None:
        self._rows, self._folder, self._learning_rate = rows, checkpoints_folder, learning_rate
        self._first: list[float] = []
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT)

    def load(self, steps: Sequence[tuple[float, float]]) -> None:
        """Load the losses and supervised tokens of the steps before a resume."""
        for loss, tokens in steps:
            self._add(loss, tokens)

    def clear(self) -> None:
        """Forget all losses, since the model has changed."""
        self._first.clear()
        self._recent.clear()

    def _add(self, loss: float, tokens: float) -> None:
        self._recent.append((loss, tokens))
        if len(self._first) < FIRST:
            self._first.append(loss)

    def __call__(self, loss: float, norm: float, rows: Indices, *, tokens: float, step: int) -> TrainingError | None:
        """An error for a loss that is not finite, or exploded; None where the step may be taken.

        Args:
            rows: Of the step's batch.
            tokens: Supervised ones of the batch, of which `loss` is the mean.
            step: Optimizer steps done before it.
        """
        known = len(self._recent) >= FIRST
        usual, full = (statistics.median(each) for each in zip(*self._recent, strict=True)) if known else (math.inf, 1)
        fresh = statistics.median(self._first) if known else math.inf
        if not np.isfinite(loss):
            problem = "The loss is not finite"
        elif not np.isfinite(norm):
            problem = "The norm of the gradient is not finite"
        elif known and usual + (loss - usual) * min(1, math.sqrt(tokens / max(full, 1))) > max(
            3 * usual, 1.5 * fresh, 2.0
        ):
            problem = "The loss exploded"
        else:
            self._add(loss, tokens)
            return None
        newest, _ = checkpoints.newest(self._folder)
        places = ", ".join(self._rows.place(int(row)) for row in rows[:8]) + (", ..." if len(rows) > 8 else "")
        return TrainingError(
            f"{problem} at step {step + 1}: loss {loss:.4g}, gradient norm {norm:.4g}, "
            f"median of the last steps {usual:.4g}.\n"
            f"  Rows of the batch: {places}\n"
            f"  Last good checkpoint: {newest or 'none yet'}\n"
            f"  Lower train.learning_rate (now {self._learning_rate:g}), raise schedule.warmup, "
            "or look at these rows."
        )
