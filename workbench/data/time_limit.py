"""Limits of time for code that comes with data, models or users, such as chat templates and rewards."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Literal

SECONDS = 5.0  # processor time for one conversation; a chat template takes milliseconds


class _TooLong(BaseException):
    """Not an Exception, so that code inside the limit does not catch it as one of its own."""


_TIMERS = {
    "processor": (signal.ITIMER_VIRTUAL, signal.SIGVTALRM),
    "wall": (signal.ITIMER_REAL, signal.SIGALRM),
}


@contextmanager
def time_limit(
    error: Callable[[], Exception], *, seconds: float = SECONDS, clock: Literal["processor", "wall"] = "processor"
) -> Iterator[None]:
    """Raise `error()` where the block takes more than `seconds` of processor time, or by the clock on the wall.

    Only the main thread can be interrupted; in other threads there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    timer, number = _TIMERS[clock]
    handler = signal.signal(number, _interrupt)
    before = signal.setitimer(timer, seconds, 1.0)  # and again where the code catches everything
    try:
        yield
    except _TooLong:
        raise error() from None
    finally:
        signal.setitimer(timer, *before)
        signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise _TooLong
