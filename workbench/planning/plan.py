"""What a run takes, and whether there is as much."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workbench.planning.rehearsal import Rehearsed
from workbench.sizes import Size


@dataclass(frozen=True)
class Plan:
    """What a run takes on one device."""

    device: str
    weights: str
    """How the backbone's weights are stored."""
    size: Size
    steps: int
    tokens_per_device: int
    """In one forward pass at most, padding included."""
    rehearsed: Rehearsed
    process: int
    """Bytes that Python and its libraries hold beside all tensors, measured in this process; 0 on an accelerator."""
    memory: int
    """Bytes that there are."""
    notes: tuple[str, ...] = ()
    """What the figures do not hold."""

    @property
    def needed(self) -> int:
        """Bytes that the run takes at its peak."""
        return self.rehearsed.peak + self.process

    @property
    def fits(self) -> bool:
        """Whether there is enough memory."""
        return self.needed <= self.memory

    @property
    def facts(self) -> dict[str, Any]:
        """Everything, for a program."""
        rehearsed = self.rehearsed
        return {
            "device": self.device,
            "weights": self.weights,
            "parameters": {"total": self.size.total, "trainable": self.size.trainable},
            "bytes": {**rehearsed.at_peak, "evaluation": rehearsed.evaluation, "peak": rehearsed.peak},
            "process_bytes": self.process,
            "memory_bytes": self.memory,
            "adapter_bytes": self.size.file_bytes,
            "flops_per_token": round(rehearsed.flops_per_token),
            "steps": self.steps,
            "batch": {"tokens_per_device": self.tokens_per_device, "micro_batches": rehearsed.micro_batches},
            "zero": {"stage": 0, "offload": "none"},
            "fits": self.fits,
            "reasons": self.reasons,
        }

    @property
    def reasons(self) -> list[str]:
        """Where the peak is, what is left, and what the figures do not hold."""
        where = "training" if self.rehearsed.trains_at_peak else "evaluation"
        spare = self.memory - self.needed
        left = f"{spare:,} bytes are left" if self.fits else f"{-spare:,} bytes are missing"
        return [f"The peak is in {where}; {left}.", *self.notes]
