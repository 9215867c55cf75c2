"""Runs untrusted code with tests in a confined process, under limits, and reports which tests passed."""

from __future__ import annotations

import functools
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from workbench.errors import ConfigError
from workbench.evaluation.rewards import confinement

_LOOK = 0.05  # seconds between checks of the clock and of the folder
_ENVIRONMENT = {"LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of untrusted code."""

    seconds: int = 5  # processor time; the wall-clock limit is twice as long
    memory: int = 512 * 2**20  # bytes of address space
    output: int = 2**20  # bytes of all files in its folder; printed output is discarded


@functools.cache
def require(limits: SandboxLimits) -> None:
    """Raise ConfigError where this machine cannot confine untrusted code; called before any runs."""
    lines = _results("", ["pass"], limits, word="word")
    if lines[:1] == ["confined"] and lines[1:] == ["word 0 passed"]:
        return
    refusal = lines[0].removeprefix("refused ") if lines and lines[0] != "confined" else None
    reason = refusal or f"its process ended at once, and {limits.memory:,} bytes of memory may be too few"
    raise ConfigError(
        f"kind=unit_tests runs code that a model wrote, and this machine does not keep it in: {reason}. It needs Linux "
        "5.13 or later on x86_64 or aarch64 with Landlock and seccomp, which a container may have to be allowed. Take "
        "another machine, or test answers otherwise in a function of yours (kind: function)."
    )


def passed(code: str, tests: Sequence[str], limits: SandboxLimits) -> list[bool]:
    """Whether each of `tests` passes after `code`, all in one process; tests after one that ends the process fail.

    The process reports each result with a secret word that it reads only after the code has run, so that code cannot
    exit early and pass. Code that reads the process's descriptors could still forge a result. Raises ConfigError: as
    `require`.
    """
    require(limits)
    word = secrets.token_hex(16)
    lines = set(_results(code, tests, limits, word=word))
    return [f"{word} {number} passed" in lines for number in range(len(tests))]


def _results(code: str, tests: Sequence[str], limits: SandboxLimits, *, word: str) -> list[str]:
    """The lines that the confined process wrote."""
    wanted = {"code": code, "seconds": limits.seconds, "memory": limits.memory, "output": limits.output}
    with (
        tempfile.TemporaryDirectory(prefix="workbench-sandbox-") as folder,
        tempfile.TemporaryFile() as asks,
        tempfile.TemporaryFile() as tells,
    ):
        for each in (wanted, {"tests": list(tests), "word": word}):
            asks.write(json.dumps(each).encode() + b"\n")
        asks.seek(0)
        _run(Path(folder).resolve(), asks, tells, limits)
        tells.seek(0)
        return tells.read(limits.output).decode(errors="replace").splitlines()


def _run(folder: Path, asks: IO[bytes], tells: IO[bytes], limits: SandboxLimits) -> None:
    """Run the process, and kill it at a limit that the kernel does not enforce (wall clock, bytes of all files)."""
    ends = (asks.fileno(), tells.fileno())
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", confinement.__file__, *map(str, ends)],
        cwd=folder,
        env=_ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=ends,
        start_new_session=True,
    )
    deadline = time.monotonic() + 2 * limits.seconds
    try:
        while time.monotonic() < deadline and _size(folder) <= limits.output:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK)
                return
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _size(folder: Path) -> int:
    """Bytes of the files in a folder without folders, at least 4 KiB each; files may vanish meanwhile."""
    total = 0
    with os.scandir(folder) as files:
        for file in files:
            with suppress(FileNotFoundError):
                total += max(4096, file.stat(follow_symlinks=False).st_size)
    return total
