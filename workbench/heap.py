"""What tensors on a CPU leave to the C library: kept for the next ones, not given back and fetched again."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt, from glibc's malloc.h."""
_KEPT = 2**30
"""Bytes: smaller tensors come from the heap, whose end is given back when as much of it is free."""


def keep() -> None:
    """From here on this process keeps memory that is freed, where its C library is glibc.

    By default tensors of more than 32 MiB are fetched from the system each time, as is the end of the heap after each
    micro-batch, and it clears every page anew: 7 % of the processor time of LoRA on 100 M parameters.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _KEPT)
        mallopt(_TRIM_THRESHOLD, _KEPT)
