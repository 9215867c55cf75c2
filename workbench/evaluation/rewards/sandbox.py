"""Runs untrusted code with tests in a confined process, under limits, and reports which tests passed."""

from __future__ import annotations

import functools
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

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
    first, verdicts = _verdicts("", ["pass"], limits)
    if first == "confined" and verdicts == [True]:
        return
    refusal = first.removeprefix("refused ") if first and first != "confined" else None
    reason = refusal or f"its process ended at once, and {limits.memory:,} bytes of memory may be too few"
    raise ConfigError(
        f"kind=unit_tests runs code that a model wrote, and this machine does not keep it in: {reason}. It needs Linux "
        "5.13 or later on x86_64 or aarch64 with Landlock and seccomp, which a container may have to be allowed. Take "
        "another machine, or test answers otherwise in a function of yours (kind: function)."
    )


def passed(code: str, tests: Sequence[str], limits: SandboxLimits) -> list[bool]:
    """Whether each of `tests` passes after `code`, all in one process; tests after one that ends the process fail.

    The code shares that process with its tests, and might answer for them. So it runs a second time, where one of the
    tests that it passed ends in an error, which it is not told: an answer that passes this one passes none. A thread
    that it leaves behind fails its tests. Raises ConfigError: as `require`.
    """
    require(limits)
    _, verdicts = _verdicts(code, tests, limits)
    if right := [number for number, verdict in enumerate(verdicts) if verdict]:
        last = secrets.choice(right)
        _, again = _verdicts(code, [*tests[:last], f"{tests[last]}\nraise AssertionError"], limits)
        if again[-1]:
            return [False] * len(tests)
    return verdicts


def _verdicts(code: str, tests: Sequence[str], limits: SandboxLimits) -> tuple[str, list[bool]]:
    """What the confined process says first, and whether each test passed.

    The word with which it tells a result is sent after the test has run.
    """
    wanted = {"code": code, "seconds": limits.seconds, "memory": limits.memory, "output": limits.output}
    verdicts: list[bool] = []
    with tempfile.TemporaryDirectory(prefix="workbench-sandbox-") as folder, _process(Path(folder), limits) as talk:
        first = talk(json.dumps(wanted))
        said = talk() if first == "confined" else ""
        for test in tests if said == "ran" else ():
            word = secrets.token_hex(16)
            said = talk(word) if talk(test.encode(errors="surrogatepass").hex()) == "ran" else ""
            if said not in (f"{word} passed", f"{word} failed"):
                break
            verdicts.append(said.endswith("passed"))
    return first, verdicts + [False] * (len(tests) - len(verdicts))


@contextmanager
def _process(folder: Path, limits: SandboxLimits) -> Iterator[Callable[..., str]]:
    """A confined process, killed at a limit that the kernel does not enforce (wall clock, bytes of all files).

    Yields a function that sends a line, if it is given one, and returns the next that comes back; empty: none comes.
    """
    (asked, asks), (told, tells) = os.pipe(), os.pipe()
    os.set_blocking(asks, False)
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", confinement.__file__, str(asked), str(tells)],
        cwd=folder.resolve(),
        env=_ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(asked, tells),
        start_new_session=True,
    )
    os.close(asked)
    os.close(tells)
    deadline, received = time.monotonic() + 2 * limits.seconds, bytearray()

    def talk(line: str | None = None) -> str:
        left = b"" if line is None else line.encode() + b"\n"
        while time.monotonic() < deadline and _size(folder) <= limits.output:
            if b"\n" in received and not left:
                first, _, rest = received.partition(b"\n")
                received[:] = rest
                return first.decode(errors="replace")
            readable, writable, _ = select.select([told], [asks] if left else [], [], _LOOK)
            with suppress(BlockingIOError, BrokenPipeError):
                left = left[os.write(asks, left) :] if writable else left
            if readable:
                received.extend(block := os.read(told, 2**16))
                if not block or len(received) > limits.output:
                    break
        return ""

    try:
        yield talk
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(asks)
        os.close(told)


def _size(folder: Path) -> int:
    """Bytes of the files in a folder without folders, at least 4 KiB each; files may vanish meanwhile."""
    total = 0
    with os.scandir(folder) as files:
        for file in files:
            with suppress(FileNotFoundError):
                total += max(4096, file.stat(follow_symlinks=False).st_size)
    return total
