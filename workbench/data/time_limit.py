"""A limit of processor time for code that comes with data or models, such as chat templates."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SECONDS = 5.0
"""Processor time for one conversation; a chat template takes milliseconds."""


class _TooLong(BaseException):
    """Not an Exception, so that code inside the limit does not catch it as one of its own."""


@contextmanager
def time_limit(error: Callable[[], Exception], *, seconds: float = SECONDS) -> Iterator[None]:
    """Raise `error()` where the block takes more than `seconds` of processor time.

    Only the main thread can be interrupted; in other threads there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGVTALRM, _interrupt)
    before = signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    except _TooLong:
        raise error() from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, *before)
        signal.signal(signal.SIGVTALRM, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise _TooLong
