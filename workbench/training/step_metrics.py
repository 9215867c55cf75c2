"""Figures of a step for metrics.jsonl: means that a loss reports of its examples, speed, and memory.

Legend: P examples of a micro-batch.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from workbench.runs.ranks import Ranks


class StepMeter:
    """Adds up figures of examples over micro-batches and processes; it changes no bit of the training."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Start a step, or start it again."""
        self._sums = {}

    @torch.no_grad()
    def add(self, figures: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Add figures of a micro-batch by their names: values (P,), and the weight (P,) of each in the mean."""
        for name, (value_P, weight_P) in figures.items():
            weight_P = weight_P.double()
            sums = torch.stack([(value_P.detach().double() * weight_P).sum(), weight_P.sum()])
            self._sums[name] = self._sums[name] + sums if name in self._sums else sums

    def means(self, ranks: Ranks) -> dict[str, float]:
        """The means since `begin`, of all processes; each must call it. Figures without weight are left out."""
        rank_sums = ranks.gathered({name: sums.tolist() for name, sums in self._sums.items()})
        names = dict.fromkeys(name for each in rank_sums for name in each)
        sums = {name: [sum(each.get(name, (0.0, 0.0))[at] for each in rank_sums) for at in (0, 1)] for name in names}
        return {name: value / weight for name, (value, weight) in sums.items() if weight}


def measured(record: dict[str, Any], *, since: float, waited_s: float, device: torch.device) -> dict[str, Any]:
    """The record of a step that began at `since` (`time.monotonic`), with its speed, memory and wait for data.

    Args:
        waited_s: Seconds of the step spent waiting for rows.
    """
    took_s = time.monotonic() - since
    speed, share = round(record["tokens"] / took_s, 1), round(min(1.0, waited_s / took_s), 4)
    return {**record, "tokens_per_second": speed, "data_wait": share, "peak_bytes": peak_bytes(device)}


def forget_peak(device: torch.device) -> None:
    """Reset the peak of memory; on a CPU, where it is that of the whole process, this does nothing."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """Most memory held so far: of the accelerator's allocator, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
