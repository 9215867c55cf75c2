"""Rows that are collated in a thread while the device computes on those before."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

import torch
from threadpoolctl import threadpool_limits


def _compute_alone() -> None:
    """Let torch use no other threads for what this one computes.

    OpenMP's own would stand beside those of the thread that trains, and where there are more of them than cores, GNU's
    lets all of them sleep between two operations rather than wait for the next one.
    """
    torch.get_num_threads()  # so that torch does not set them later
    threadpool_limits(1, user_api="openmp")


class Pinnable(Protocol):
    """Tensors that can move to pinned memory."""

    def pinned(self: BatchT) -> BatchT:
        """The same in memory from which an accelerator copies while it computes."""


BatchT = TypeVar("BatchT", bound=Pinnable)


class Prefetcher(Generic[BatchT]):
    """Makes micro-batches before they are asked for, one at a time; what it makes is the same as without it. `pin`: put
    them into pinned memory, from which an accelerator copies while it computes."""

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="workbench-rows", initializer=_compute_alone)
        self._expected: tuple[Hashable, Future[BatchT]] | None = None
        self.waited_s = 0.0  # seconds that the device waited for a micro-batch

    def get(self, key: Hashable, make: Callable[[], BatchT]) -> BatchT:
        """The micro-batch of this key; raises what making it raised."""
        began = time.monotonic()
        try:
            expected, self._expected = self._expected, None
            if expected is not None and expected[0] == key:
                return expected[1].result()
            self._drop(expected)
            return self._made(make)
        finally:
            self.waited_s += time.monotonic() - began

    def expect(self, key: Hashable, make: Callable[[], BatchT]) -> None:
        """Begin to make the micro-batch that is probably asked for next; another one that was expected is forgotten."""
        self._drop(self._expected)
        self._expected = key, self._worker.submit(self._made, make)

    def close(self) -> None:
        """End the thread; what it is making is waited for and forgotten."""
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._expected = None

    def _made(self, make: Callable[[], BatchT]) -> BatchT:
        batch = make()
        return batch.pinned() if self._pin else batch

    @staticmethod
    def _drop(expected: tuple[Hashable, Future[BatchT]] | None) -> None:
        if expected is not None:
            expected[1].cancel()
