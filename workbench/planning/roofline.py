"""The most that this device computes and reads, measured within a quarter of a second: no step is faster."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

SECONDS = 0.1
"""For measuring each, about."""
ROWS, WIDTH, LARGE = 256, 1024, 8192
"""Rows and width of the matrices that are multiplied: about those of a block; both on an accelerator, which is fully at
work from there on."""
READ, LARGE_READ = 2**27, 2**30
"""Bytes that are read: more than caches hold; on an accelerator."""


class Roofline(NamedTuple):
    """Rates that no step exceeds."""

    flops: float
    """Floating-point operations a second of a matrix product."""
    bandwidth: float
    """Bytes a second that are read from memory."""


def roofline(device: torch.device, dtype: torch.dtype, *, clock: Callable[[], float] = time.perf_counter) -> Roofline:
    """Both rates of a device, at best."""
    many, width, read = (ROWS, WIDTH, READ) if device.type == "cpu" else (LARGE, LARGE, LARGE_READ)
    rows = torch.full((many, width), 0.5, dtype=dtype, device=device)
    matrix = torch.full((width, width), 0.5, dtype=dtype, device=device)
    numbers = torch.ones(read // 4, dtype=torch.int32, device=device)
    product = _fastest(lambda: rows @ matrix, device, clock)
    reading = _fastest(numbers.max, device, clock)
    return Roofline(2 * many * width * width / product, read / reading)


def _fastest(call: Callable[[], object], device: torch.device, clock: Callable[[], float]) -> float:
    """Seconds of a call, at best."""
    call()  # the first time takes longer
    best, began = float("inf"), clock()
    while best == float("inf") or clock() < began + SECONDS:
        synchronize(device)
        start = clock()
        call()
        synchronize(device)
        best = min(best, max(clock() - start, 1e-9))
    return best


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has computed what it was asked for."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
