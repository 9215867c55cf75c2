"""log.txt of a run: what its console says, for who looks later or from elsewhere."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from workbench.errors import Stopped, WorkbenchError
from workbench.runs import files

NAME = "log.txt"
CONSOLE = "WORKBENCH_CONSOLE"
"""Environment variable with the file that a process prints to, where somebody keeps that: the log takes its place."""
MOST = 2**22
"""Bytes of a log; of a longer one the older half is dropped."""


class RunLog:
    """Plain lines at the end of a run's log, each on disk once it is written: a killed run has them.

    What is written before the run has a directory waits for it. A log that cannot be written ends no run.
    """

    def __init__(self) -> None:
        self._early: list[str] = []
        self._path: Path | None = None
        self._descriptor = -1
        self._printed = False
        """Whether the console is this file, so that what is printed stands in it."""

    def open(self, folder: Path) -> None:
        """Go on with the log of the run in `folder`, which takes what was written so far.

        Where CONSOLE names the file that this process prints to, what stands there moves to the log, and the process
        prints to the log from now on: words of libraries, and last words of a crash, too.
        """
        self._path = folder / NAME
        printed = os.environ.pop(CONSOLE, None)
        with suppress(OSError):
            self._descriptor = _opened(self._path)
            self._printed = _is_console(self._path)
            if printed is not None and _is_console(Path(printed)):
                self._take_place_of(Path(printed))
        early, self._early = self._early, []
        for text in early:
            self.write(text)

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def write(self, text: str) -> None:
        """Add a sentence that the console says, without control characters."""
        if self._path is None:
            self._early.append(text)
            return
        with suppress(OSError):
            if not self._printed:
                plain = "".join(each for each in text if each.isprintable() or each in "\n\t")
                os.write(self._descriptor, f"{plain.rstrip()}\n".encode(errors="replace"))
            if os.fstat(self._descriptor).st_size > MOST:
                self._shorten(self._path)

    def end(self, error: BaseException) -> None:
        """Add what ends the run: a mistake or a stop in its words, anything else with its traceback."""
        if isinstance(error, WorkbenchError):
            self.write(f"Error: {error}")
        elif isinstance(error, Stopped):
            self.write(str(error))
        else:
            self.write("".join(traceback.format_exception(error)))

    def _take_place_of(self, printed: Path) -> None:
        _flush()
        os.write(self._descriptor, printed.read_bytes())
        self._print_here()
        printed.unlink()

    def _print_here(self) -> None:
        for console in (1, 2):
            os.dup2(self._descriptor, console)
        self._printed = True

    def _shorten(self, path: Path) -> None:
        """Drop the older half, and up to the end of the line there."""
        _flush()
        with path.open("rb") as file:
            file.seek(-MOST // 2, os.SEEK_END)
            newer = file.read()
        files.write_bytes(path, b"(older lines were dropped)\n" + newer[newer.find(b"\n") + 1 :])
        self.close()
        self._descriptor = _opened(path)
        if self._printed:
            self._print_here()


def add(folder: Path, text: str) -> None:
    """Add what the console says of a run when it is over."""
    log = RunLog()
    log.open(folder)
    log.write(text)
    log.close()


def _opened(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def _is_console(path: Path) -> bool:
    """Whether this process prints errors to a file."""
    try:
        return os.path.samestat(os.fstat(2), path.stat())
    except OSError:
        return False


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
