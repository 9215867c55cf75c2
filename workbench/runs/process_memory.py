"""Garbage collection, compilation and memory of a process, switched off where they cost more time than they save."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_NO_COMPILER = "TORCHDYNAMO_DISABLE"
"""Environment variable that torch.compile reads at each call."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt, from glibc's malloc.h."""
_KEPT = 2**30
"""Bytes: smaller tensors come from the heap, whose end is given back to the system when this much of it is free."""
_TUNABLES = "GLIBC_TUNABLES"
"""Environment variable that glibc reads when a process starts, and never again."""
_NO_CACHES = "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"


@contextmanager
def importing() -> Iterator[None]:
    """Disables garbage collection and torch.compile inside the block, then freezes all live objects (`gc.freeze`).

    For the heavy imports with which a command begins. What torch and transformers create holds no garbage: their
    import takes a fifth less time so, and so does the plan of a model of 8 B parameters.

    PEFT imports bitsandbytes, which passes four functions to torch.compile and thereby imports torch's compiler: 1.1 s
    of the 5.2 s that PEFT takes on a core of an AMD EPYC. These functions replace kernels that bitsandbytes has itself
    on CPUs and CUDA, and compute the same uncompiled. Whatever is compiled after the block is compiled as usual.
    """
    collects, asked = gc.isenabled(), os.environ.get(_NO_COMPILER)
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
        if collects:
            gc.enable()


def restart_without_caches() -> None:
    """Start this command again, in the same process, without glibc's caches of small blocks; at most once.

    Torch aligns tensors to 64 bytes, and glibc cuts what stands before each of them off the block that it found. Kept
    in a cache, such a piece soon holds a small object amid the space of large tensors, which then fits none of them: in
    a run of sft/quickstart the heap grew to 570 MB for 150 MB of objects.
    """
    words = sys.argv[1:]
    asked_for = sys.orig_argv[len(sys.orig_argv) - len(words) :] == words  # a fork has its parent's
    if sys.platform == "linux" and asked_for and _TUNABLES not in os.environ:
        os.environ[_TUNABLES] = _NO_CACHES
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def keep() -> None:
    """Make this process keep the memory of freed CPU tensors for the next ones; only with glibc.

    By default glibc asks the system for every tensor of more than 32 MiB and for the end of the heap after each
    micro-batch, and the system zeroes every page: 7 % of the processor time of LoRA on 100 M parameters.
    """
    mallopt = _of_glibc("mallopt")
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _KEPT)
        mallopt(_TRIM_THRESHOLD, _KEPT)


def settled() -> int:
    """Bytes of this process without garbage, and without what it could give back, which it does."""
    import psutil  # a plan needs it, and what answers at once does not

    gc.collect()
    if (malloc_trim := _of_glibc("malloc_trim")) is not None:
        malloc_trim(0)
    rss: int = psutil.Process().memory_info().rss
    return rss


def _of_glibc(name: str) -> Callable[..., object] | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
