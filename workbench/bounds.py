"""Bounds of what comes from others: code and patterns end in time and fit into memory, and files have an end."""

from __future__ import annotations

import errno
import os
import resource
import signal
import stat
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

SECONDS = 5
"""Processor time; templates and patterns that mean well take milliseconds."""
MEMORY = 2**30
"""Bytes of address space beside those of this process."""
_TOO_DEEP, _TOO_LARGE = 3, 4


def is_endless(path: str | Path) -> bool:
    """Whether a path names a pipe, a device or a socket: reading it may wait for ever, or never end."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # nothing, or no path at all
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def opened(path: Path) -> BinaryIO:
    """A file that has an end, to read; raises OSError where there is none, or it is a pipe or a device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def fault(act: Callable[[], object], *, seconds: int = SECONDS) -> str | None:
    """What `act` would take too much of, in words; None where it ends within the limits, whatever it returns or raises.

    It is carried out in a fork of this process, in which alone it has effects: a loop in native code, such as that of a
    power or of a regular expression, cannot be interrupted, only ended with its process.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the fork runs Python, and none of this process's threads
        child = os.fork()
    if child == 0:
        _try(act, seconds)
    _, status = os.waitpid(child, 0)
    ended, code = (os.WTERMSIG(status), 0) if os.WIFSIGNALED(status) else (0, os.WEXITSTATUS(status))
    if ended in (signal.SIGXCPU, signal.SIGKILL):
        return f"takes more than {seconds} seconds of computing"
    if code == _TOO_LARGE:
        return f"takes more than {MEMORY:,} bytes of memory"
    return "nests too deeply" if code == _TOO_DEEP or ended == signal.SIGSEGV else None


def _try(act: Callable[[], object], seconds: int) -> None:
    """Carry out `act` within limits; ends the process."""
    code = 0
    try:
        for number in (signal.SIGXCPU, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        signal.alarm(10 * seconds)  # a lock that another thread of the parent held is no fault of what is tried
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        with suppress(OSError, ValueError):  # systems that cannot tell or limit memory
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)
        act()
    except MemoryError:
        code = _TOO_LARGE
    except RecursionError:
        code = _TOO_DEEP
    except BaseException:  # told where the same happens outside of the trial
        code = 0
    finally:
        os._exit(code)
