"""The most that this device computes, measured within a tenth of a second: no step is faster."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

SECONDS = 0.1
"""For measuring, about."""
ROWS, WIDTH = 256, 1024
"""Of the matrices that are multiplied: about as large as those of a block."""


def matmul_rate(device: torch.device, dtype: torch.dtype, *, clock: Callable[[], float] = time.perf_counter) -> float:
    """Floating-point operations a second of a matrix product, at best."""
    rows = torch.full((ROWS, WIDTH), 0.5, dtype=dtype, device=device)
    matrix = torch.full((WIDTH, WIDTH), 0.5, dtype=dtype, device=device)
    best, began = float("inf"), clock()
    rows @ matrix  # the first product of a precision takes longer
    while best == float("inf") or clock() < began + SECONDS:
        synchronize(device)
        start = clock()
        rows @ matrix
        synchronize(device)
        best = min(best, max(clock() - start, 1e-9))
    return 2 * ROWS * WIDTH * WIDTH / best


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has computed what it was asked for."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
