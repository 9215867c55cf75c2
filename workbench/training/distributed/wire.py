"""Traffic between processes in a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Wire:
    """How it travels, which a step decides, and how much, which those count that send."""

    compressing: bool = False
    """Whether as codes: compression is on, and its warm-up over."""
    sent: int = 0
    """Bytes that this process has sent in the step."""


def ring_bytes(size: int, world: int) -> int:
    """Bytes that each process sends where so many are added up in a ring."""
    return 2 * size * (world - 1) // world
