"""Speed and memory of training steps."""

from __future__ import annotations

import resource
import time
from typing import Any

import torch


def measured(record: dict[str, Any], *, since: float, device: torch.device) -> dict[str, Any]:
    """The record of a step that began at `since` (`time.monotonic`), with tokens per second and peak memory."""
    speed = round(record["tokens"] / (time.monotonic() - since), 1)
    return {**record, "tokens_per_second": speed, "peak_bytes": peak_bytes(device)}


def peak_bytes(device: torch.device) -> int:
    """Most memory held so far: of the accelerator's allocator, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
