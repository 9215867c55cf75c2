"""A limit for code that a row or a template brings: it ends, or it is told that it does not."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SECONDS = 5.0
"""Of processor time for one conversation; a chat template takes milliseconds."""


class _TooLong(BaseException):
    """Not an Exception: what runs inside the limit cannot take it for one of its own."""


@contextmanager
def bounded(error: Callable[[], Exception], *, seconds: float = SECONDS) -> Iterator[None]:
    """Raise `error()` where the block takes more than so many seconds of processor time.

    Only the main thread of a process can be interrupted; elsewhere there is no limit.
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
