"""One process for each device of this machine, started, watched and ended together by torch's elastic agent."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workbench.errors import ConfigError, Stopped, WorkbenchError
from workbench.runs.resume_command import resume_command

LOOK = 0.1
"""Seconds between two looks at whether all live."""


MISTAKE = "Error: "
"""Begins the message of a user's mistake."""


class RankError(WorkbenchError):
    """A process of several failed; the message is its own."""


def needed() -> bool:
    """Whether the processes are still to be started."""
    return "WORLD_SIZE" not in os.environ


def launch(devices: int, arguments: Sequence[str]) -> None:
    """Run the command line `arguments` in `devices` processes that train together.

    Raises:
        ConfigError: There are not so many devices.
        RankError: One process failed: the first that did, in its own words. The others are ended.
        Stopped: They were asked to stop, and saved a checkpoint.
    """
    _require_devices(devices)
    # A core each on a CPU, however many threads one process would take alone.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // devices)))
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with tempfile.TemporaryDirectory(prefix="workbench-launch-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=devices,
            run_id=str(os.getpid()),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            monitor_interval=LOOK,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            log_line_prefix_template="",
        )
        _quieten()
        try:
            elastic_launch(config, sys.executable)("-m", "workbench.cli.verbs", *arguments)
        except ChildFailedError as failed:
            raise _first_of(failed, Path(folder)) from None
        except SignalException:
            raise _stopped(Path(folder)) from None


def report(file: Path, text: str) -> None:
    """Tell the launcher why this process ends, and when that was."""
    message = {"message": text, "extraInfo": {"py_callstack": "", "timestamp": str(int(time.time()))}}
    file.write_text(json.dumps({"message": message, "at": time.time()}))


def _require_devices(devices: int) -> None:
    import torch

    there = torch.accelerator.device_count() if torch.accelerator.is_available() else os.cpu_count() or 1
    kind = "accelerators" if torch.accelerator.is_available() else "processor cores"
    if devices > there:
        raise ConfigError(f"--devices {devices}: this machine has {there} {kind}. Write --devices {there} or fewer.")


def _first_of(failed: Any, folder: Path) -> Exception:
    """The error of the process that failed first; lost connections of the others follow from it."""
    errors, exits = _reported_errors(folder), {rank: failure.exitcode for rank, failure in failed.failures.items()}
    if errors and all(status == 3 for status in exits.values()):
        return Stopped(min(errors)[2])
    mistakes = [each for each in errors if each[2].startswith(MISTAKE)]
    killed = [rank for rank, status in exits.items() if status < 0 and status != -signal.SIGTERM]
    if killed and not mistakes:
        runs = sys.argv[1:2] == ["run"]
        again = f"Continue with: {resume_command()}" if runs else "Repeat the command."
        return RankError(
            f"Process {killed[0]} was ended by signal {-exits[killed[0]]} and could say nothing: killed, or out of "
            f"memory. The others were ended, too; what was saved is good. {again}"
        )
    if not errors:
        return RankError(f"Process {min(exits)} ended with status {exits[min(exits)]} and said nothing.")
    _, rank, text = min(mistakes or errors)
    text = text.removeprefix(MISTAKE)
    return RankError(text if rank == 0 else f"Process {rank} failed first.\n{text}")


def _stopped(folder: Path) -> Exception:
    errors = _reported_errors(folder)
    return Stopped(min(errors)[2]) if errors else Stopped("Stopped before a checkpoint could be saved.")


def _reported_errors(folder: Path) -> list[tuple[float, int, str]]:
    """Time, rank and message of each process that left one."""
    errors = []
    for file in folder.rglob("error.json"):
        content = json.loads(file.read_text())
        errors.append((content["at"], int(file.parent.name), content["message"]["message"]))
    return errors


def _quieten() -> None:
    """Print an error once, in the words of the process that failed."""
    import logging

    for name in ("torch.distributed.run", "torch.distributed.elastic"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
