"""Memory and imports that are left alone because looking after them takes longer than it is worth."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_NO_COMPILER = "TORCHDYNAMO_DISABLE"
"""Environment variable that torch.compile asks whenever it is called."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt, from glibc's malloc.h."""
_KEPT = 2**30
"""Bytes: smaller tensors come from the heap, whose end is given back when as much of it is free."""


@contextmanager
def importing() -> Iterator[None]:
    """Inside the block Python looks for no garbage, and in what is there at its end never again; nothing is compiled.

    For processes of a command, which begin so. In what torch and transformers bring along there is no garbage. Their
    import takes a fifth less time so, and the plan of a model of 8 B parameters, too.

    PEFT imports bitsandbytes, which gives four functions to torch.compile and so imports torch's compiler: 1.1 s of
    the 5.2 that PEFT and what it needs take on a core of an AMD EPYC. These functions are replacements of kernels that
    bitsandbytes has itself on CPUs and CUDA, except for odd numbers of inputs, and compute the same as they are
    written. What is given to torch.compile after the block is compiled.
    """
    looks, asked = gc.isenabled(), os.environ.get(_NO_COMPILER)
    gc.disable()
    os.environ[_NO_COMPILER] = "1"
    try:
        yield
        gc.freeze()
    finally:
        if asked is None:
            del os.environ[_NO_COMPILER]
        else:
            os.environ[_NO_COMPILER] = asked
        if looks:
            gc.enable()


def keep() -> None:
    """From here on this process keeps memory that tensors on a CPU free, where its C library is glibc.

    By default tensors of more than 32 MiB are fetched from the system each time, as is the end of the heap after each
    micro-batch, and it clears every page anew: 7 % of the processor time of LoRA on 100 M parameters.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _KEPT)
        mallopt(_TRIM_THRESHOLD, _KEPT)
