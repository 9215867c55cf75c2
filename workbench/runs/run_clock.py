"""From section `budget` to the clock of a run, which survives the process that it runs in."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from workbench.config import RunConfig
from workbench.config.budget_config import BudgetConfig
from workbench.errors import ConfigError
from workbench.runs import files
from workbench.runs.timing import LEAVING, Pause, TimePlan, Timer

BEAT = 0.5
"""Seconds between two notes of what is spent."""


def start(config: BudgetConfig, file: Path, *, began: float) -> Timer | None:
    """The clock of a run that `config` limits, going on from what `file` holds of earlier processes; else None.

    Args:
        began: When this process began, by `time.monotonic`.

    Raises:
        ConfigError: It is to end with its Slurm job, and runs in none.
    """
    if not config.timed:
        return None
    state = files.read_json(file) or None
    spent = float(state["spent_s"]) if state else 0.0
    limits = [] if config.seconds is None else [config.seconds]
    if config.time == "slurm":
        limits.append(spent + (time.monotonic() - began) + _slurm_end() - time.time())
    return Timer(min(limits), began=began, spent_s=spent, state=state, larger=lambda seconds: _larger(config, seconds))


def require_end(config: BudgetConfig) -> None:
    """Raise ConfigError where a run is to end with its Slurm job, and this process runs in none."""
    if config.time == "slurm":
        _slurm_end()


def plan(config: RunConfig, *, held_out: int, test: int, peers: int = 1) -> TimePlan:
    """Everything that a run does besides training steps.

    Args:
        held_out: Tokens of the held-out rows.
        test: Tokens of the test rows.
        peers: Models that train together, the best of which is shipped.
    """
    evaluations = peers * (1.0 if config.average.method == "none" else 2.0)
    after = {
        "evaluation": (0.0 if config.evaluate.every is None else evaluations) + (peers if peers > 1 else 0),
        "checkpoint": 2.0,
        "load": 1.0,
        "scoring": 1 + test / held_out,
        "answers": 1.0 + (test > 0),
        "report": 2 + LEAVING,
    }
    pauses = [Pause("evaluation", config.evaluate.every, evaluations), Pause("checkpoint", config.save.every)]
    return TimePlan(after, pauses, tokens=held_out)


@contextmanager
def kept(timer: Timer | None, file: Path) -> Iterator[None]:
    """Note in `file`, again and again, what `timer` knows, so that a killed run goes on with what it spent."""
    if timer is None:
        yield
        return
    over = threading.Event()

    def note() -> None:
        # Not through to the disk: what outlives the process is enough, and syncing takes its time.
        aside = file.with_name(f".{file.name}.unfinished")
        with suppress(OSError):  # a full disk is told by what must be written
            aside.write_text(json.dumps(timer.state()))
            os.replace(aside, file)

    def beat() -> None:
        while not over.wait(BEAT):
            note()

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        note()


def process_began() -> float:
    """When this process began, by `time.monotonic`."""
    stat = Path("/proc/self/stat")
    if not stat.exists():
        return time.monotonic() - time.time() + float(psutil.Process().create_time())
    # psutil counts from a boot time that the kernel tells in whole seconds.
    ticks = int(stat.read_text().rpartition(")")[2].split()[19])
    per_second: int = os.sysconf("SC_CLK_TCK")
    return time.monotonic() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / per_second)


def _slurm_end() -> float:
    """When the Slurm job that this process runs in will be ended, Unix time."""
    end = os.environ.get("SLURM_JOB_END_TIME", "")
    if not end.isdecimal():
        raise ConfigError(
            "budget.time=slurm: this is no Slurm job, or its Slurm does not tell when it will end "
            "(SLURM_JOB_END_TIME). Write the time itself, such as budget.time=90m."
        )
    return float(end)


def _larger(config: BudgetConfig, seconds: float) -> str:
    """Setting to write, or limit to ask for, where a run needs so many seconds."""
    hours = seconds / 3600
    needed = {"time": seconds, "energy": hours * (config.power or 0), "money": hours * (config.price or 0)}
    given = {name: getattr(config, name) for name in needed}
    words = [f"sbatch --time={math.ceil(seconds / 60)}"] if config.time == "slurm" else []
    short = [name for name, value in given.items() if isinstance(value, float) and value < needed[name]]
    return " and ".join([*words, *(f"budget.{name}={needed[name]:.4g}" for name in short)])
