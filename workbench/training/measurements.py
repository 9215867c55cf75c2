"""Speed and memory of training steps."""

from __future__ import annotations

import resource
import time
from typing import Any

import torch


def measured(record: dict[str, Any], *, since: float, waited_s: float, device: torch.device) -> dict[str, Any]:
    """The record of a step that began at `since` (`time.monotonic`), with its speed, memory and wait for data.

    Args:
        waited_s: Seconds of the step in which the next rows were not there yet.
    """
    took_s = time.monotonic() - since
    speed, share = round(record["tokens"] / took_s, 1), round(min(1.0, waited_s / took_s), 4)
    return {**record, "tokens_per_second": speed, "data_wait": share, "peak_bytes": peak_bytes(device)}


def forget_peak(device: torch.device) -> None:
    """Look for the most memory from now on, without what did not fit; a CPU knows that of the whole process alone."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """Most memory held so far: of the accelerator's allocator, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
