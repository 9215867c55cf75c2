"""Noise of the micro-batches of a step: what their rows draw is a function of seed, step and row alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from workbench.adapters.row_dropout import RowDraw, drawing
from workbench.config import RunConfig
from workbench.data.batching import Examples, Indices


class StepNoise:
    """Makes the noise of micro-batches of a run.

    Args:
        packed: Whether the rows of a micro-batch lie in one sequence.
    """

    def __init__(self, config: RunConfig, device: torch.device, *, packed: bool) -> None:
        self._seed, self._passes = config.seed, 2 if config.regularise.r_drop else 1
        self._device, self._packed = device, packed

    @contextmanager
    def of(self, rows: Indices, seen: Examples, *, step: int) -> Iterator[None]:
        """Around the forward and the backward pass of a micro-batch, in step `step` (from 0)."""
        first = RowDraw(self._seed, step, rows, seen.lengths[rows], self._packed)
        # The backbone's own dropout, which knows no rows.
        torch.manual_seed(int(np.random.SeedSequence([self._seed, step, int(rows[0])]).generate_state(1)[0]))
        with drawing([first._replace(copy=number) for number in range(self._passes)], self._device):
            yield
