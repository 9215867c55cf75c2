"""log.txt of a run: a copy of what its console shows."""

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
"""Environment variable with the file that the process's output is redirected to, which the log replaces."""
MOST = 2**22
"""Most bytes of a log; of a longer one the older half is dropped."""


class RunLog:
    """Appends plain lines to a run's log, unbuffered, so that they survive when the run is killed.

    Lines written before the run has a directory are kept until then. A log that cannot be written ends no run.
    """

    def __init__(self) -> None:
        self._early: list[str] = []
        self._path: Path | None = None
        self._descriptor = -1
        self._printed = False
        """Whether the process's output goes to this file already."""

    def open(self, folder: Path) -> None:
        """Append to the log of the run in `folder` from now on, starting with the lines written so far.

        Where CONSOLE names the file that this process prints to, its content moves to the log and the process prints
        to the log from now on, so that messages of libraries and of a crash are in it, too.
        """
        self._path = folder / NAME
        printed = os.environ.pop(CONSOLE, None)
        with suppress(OSError):
            self._descriptor = _opened(self._path)
            self._printed = _is_console(self._path)
            if printed is not None and _is_console(Path(printed)):
                _flush()
                os.write(self._descriptor, Path(printed).read_bytes())
                self._redirect_output()
                Path(printed).unlink()
        early, self._early = self._early, []
        for text in early:
            self.write(text)

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def write(self, text: str) -> None:
        """Add a line without control characters."""
        if self._path is None:
            self._early.append(text)
            return
        with suppress(OSError):
            if not self._printed:
                plain = "".join(each for each in text if each.isprintable() or each in "\n\t")
                os.write(self._descriptor, f"{plain.rstrip()}\n".encode(errors="replace"))
            if os.fstat(self._descriptor).st_size > MOST:
                _flush()
                with self._path.open("rb") as file:
                    file.seek(-MOST // 2, os.SEEK_END)
                    newer = file.read()
                files.write_bytes(self._path, b"(older lines were dropped)\n" + newer[newer.find(b"\n") + 1 :])
                self.close()
                self._descriptor = _opened(self._path)
                if self._printed:
                    self._redirect_output()

    def end(self, error: BaseException) -> None:
        """Add why the run ended: the message of a mistake or a stop, the traceback of anything else."""
        if isinstance(error, WorkbenchError | Stopped):
            self.write(f"{'' if isinstance(error, Stopped) else 'Error: '}{error}")
        else:
            self.write("".join(traceback.format_exception(error)))

    def _redirect_output(self) -> None:
        for console in (1, 2):
            os.dup2(self._descriptor, console)
        self._printed = True


def add(folder: Path, text: str) -> None:
    """Append `text` to the log of a run that is over."""
    log = RunLog()
    log.open(folder)
    log.write(text)
    log.close()


def _opened(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def _is_console(path: Path) -> bool:
    """Whether this process's standard error is `path`."""
    try:
        return os.path.samestat(os.fstat(2), path.stat())
    except OSError:
        return False


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
