"""A queue of commands, each in a process of its own, one at a time, so that no two compete for a device.

The queue is on disk: a running command continues when the server ends, and the next server takes it over. It stands in
the user's own state folder, never in the folder of runs, which may come from anybody.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil
from pydantic import TypeAdapter, ValidationError

from workbench.cli.ui.run_folder import is_live
from workbench.errors import ConfigError, WorkbenchError
from workbench.runs import files, run_log

_log = logging.getLogger(__name__)
State = Literal["waiting", "running", "stopping", "done", "stopped", "failed"]
OVER = ("done", "stopped", "failed")
_KEPT = 50
"""Number of finished jobs that are kept."""
_ENDED: dict[int, State] = {0: "done", 3: "stopped"}


@dataclass(frozen=True)
class QueuedCommand:
    """A command of the workbench."""

    number: int
    verb: str
    words: tuple[str, ...]
    """Words of the command line after `workbench`."""
    run: str
    """Name of the run that it writes or reads."""
    state: State = "waiting"
    pid: int | None = None
    born: float | None = None
    """When that process began, in seconds since 1970: a later process may get the same pid."""
    began: float | None = None
    ended: float | None = None


def _command(job: QueuedCommand) -> list[str]:
    return [sys.executable, "-m", "workbench.cli", *job.words]


_JOBS = TypeAdapter(list[QueuedCommand])


def state_folder(runs: Path) -> Path:
    """The folder of the queue of a folder of runs; XDG_STATE_HOME moves it.

    Raises:
        ConfigError: It cannot be made, or another user could write in it.
    """
    base = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "peft-workbench" / "queues"
    folder = base / hashlib.sha256(os.fsencode(runs.resolve())).hexdigest()[:32]
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be written ({error.strerror}). Set XDG_STATE_HOME to a folder of yours."
        ) from None
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ConfigError(f"{folder}: others may write in it. Write `chmod 700 {folder}`, or set XDG_STATE_HOME.")
    return folder


class JobQueue:
    """The jobs of a folder of runs.

    Raises:
        ConfigError: Another server uses this folder.
    """

    def __init__(self, folder: Path) -> None:
        self._runs, self._folder = folder, state_folder(folder)
        try:
            self._runs.mkdir(parents=True, exist_ok=True)
            lock = (self._folder / "lock").open("a")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ConfigError(
                f"{self._runs}: another `workbench ui` shows this folder. Open that one, or stop it."
            ) from (None)
        except OSError as error:
            raise ConfigError(f"{self._runs}: cannot be written ({error.strerror}). Name another folder.") from None
        self._lock = lock
        self._child: subprocess.Popen[bytes] | None = None
        self._jobs = {job.number: job for job in self._read()}
        self.trouble = ""
        """Why the queue is stuck; empty where it is not."""

    def _read(self) -> list[QueuedCommand]:
        path = self._folder / "jobs.json"
        try:
            return _JOBS.validate_json(path.read_bytes()) if path.exists() else []
        except (ValidationError, OSError):
            os.replace(path, path.with_suffix(".damaged"))
            _log.warning(f"{path}: damaged, so that the queue begins anew. What it held is in {path.stem}.damaged.")
            return []

    def _write(self) -> None:
        over = [job.number for job in self._jobs.values() if job.state in OVER]
        for number in over[:-_KEPT]:
            del self._jobs[number]
            self._printed(number).unlink(missing_ok=True)
        files.write_json(self._folder / "jobs.json", [asdict(job) for job in self._jobs.values()])

    def close(self) -> None:
        """Release the folder. A running command continues."""
        self._lock.close()

    @property
    def jobs(self) -> list[QueuedCommand]:
        """All jobs, oldest first."""
        return list(self._jobs.values())

    def log(self, number: int) -> Path:
        """The file with a job's output: the run's log once that exists."""
        printed, job = self._printed(number), self._jobs.get(number)
        if job is None or job.verb != "run" or printed.exists():
            return printed
        return self._runs / job.run / run_log.NAME

    def _printed(self, number: int) -> Path:
        """The file that a job prints to, until the run's log replaces it."""
        return self._folder / f"{number}.log"

    def busy(self, run: str) -> bool:
        """Whether a job of this run waits or runs."""
        return any(job.run == run and job.state not in OVER for job in self._jobs.values())

    def add(self, verb: str, words: Sequence[str], *, run: str) -> QueuedCommand:
        """Append a command to the queue."""
        job = QueuedCommand(max(self._jobs, default=0) + 1, verb, (verb, *words), run)
        self._jobs[job.number] = job
        self._write()
        self.go_on()
        return self._jobs[job.number]

    def stop(self, number: int) -> bool:
        """Ask a running job to save and end, or remove a waiting one; False where it is over already."""
        job = self._jobs.get(number)
        if job is None or job.state in OVER:
            return False
        if job.state == "waiting":
            self._change(job, state="stopped", ended=time.time())
        elif (process := self._process(job)) is not None:
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                process.terminate()
            self._change(job, state="stopping")
        return True

    def step(self) -> None:
        """Start the next command if the running one has ended."""
        for job in self.jobs:
            if job.state in ("running", "stopping"):
                if self._process(job) is not None:
                    return
                self._change(job, state=self._outcome(job), ended=time.time())
                self._child = None
        if not any(is_live(path.parent) for path in self._runs.glob("*/run.lock")):
            for job in [job for job in self.jobs if job.state == "waiting"][:1]:
                keeps = {run_log.CONSOLE: str(self._printed(job.number))} if job.verb == "run" else {}
                with self._printed(job.number).open("wb") as log:
                    self._child = subprocess.Popen(
                        _command(job),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,  # Ctrl-C in the server's terminal does not reach it
                        env={**os.environ, "COLUMNS": "100", "PYTHONUNBUFFERED": "1", **keeps},
                    )
                pid = self._child.pid
                self._change(job, state="running", pid=pid, born=psutil.Process(pid).create_time(), began=time.time())

    def go_on(self) -> None:
        """Step; where that fails, `trouble` says why and the next call tries again."""
        try:
            self.step()
        except Exception as error:  # no error may end the queue
            trouble = f"The queue waits: {error}. Mend that, and it goes on by itself."
            if trouble != self.trouble:
                _log.error("%s", trouble, exc_info=not isinstance(error, OSError | WorkbenchError))
            self.trouble = trouble
        else:
            self.trouble = ""

    def _process(self, job: QueuedCommand) -> psutil.Process | subprocess.Popen[bytes] | None:
        """The process that carries out a job; None where it has ended.

        The file may name any process: it is the job's where its beginning, its user and its words are the job's, too.
        """
        if self._child is not None and self._child.pid == job.pid:
            return self._child if self._child.poll() is None else None
        try:
            process = psutil.Process(job.pid)
            words = process.cmdline()[-len(job.words) - 2 :]
            known = (process.uids().real, words) == (os.getuid(), _command(job)[1:])
            # Linux dates it anew where the clock is set.
            known = known and abs(process.create_time() - (job.born or 0)) < 2
            return process if known and process.status() != psutil.STATUS_ZOMBIE else None
        except (psutil.Error, ValueError, OverflowError):
            return None

    def _outcome(self, job: QueuedCommand) -> State:
        """How a job ended, by its exit status or, if another server started it, by the run's manifest."""
        if self._child is not None and self._child.pid == job.pid:
            return _ENDED.get(self._child.returncode, "failed")
        try:
            status: Any = files.read_json(self._runs / job.run / "manifest.json").get("status")
        except WorkbenchError:
            return "failed"
        return status if status in OVER else "failed"

    def _change(self, job: QueuedCommand, **facts: Any) -> None:
        self._jobs[job.number] = replace(job, **facts)
        self._write()
