"""Seconds from the command to its first step, of starts one after another on one core: medians.

    python scripts/bench/first_step.py [RECIPE] [--starts 5] [--core 0] [--set KEY=VALUE ...]

Every start is `python -m workbench.cli run RECIPE`, and is ended after its first step. One more comes first and does
not count: it writes bytecode and tokenised rows, which later ones read. Processor time is that of the process with all
its threads; on a core that nobody else uses it is what the wall clock shows, but for reads from the disk.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import measuring

TICKS = os.sysconf("SC_CLK_TCK")
POLL_S = 0.005


class Start(NamedTuple):
    """Seconds from the command on: processor time, and by the wall clock."""

    training_s: float | None
    """Until `Training:` is shown: rows are read, and the model is there. None where it is not, as of folds."""
    step_s: float
    """Until the first step is written, of a run or of one of its members."""
    training_wall_s: float | None
    step_wall_s: float


def main() -> None:
    arguments = _arguments()
    os.sched_setaffinity(0, {arguments.core})
    print(machine := measuring.machine("cpu", ("torch", "transformers", "peft", "datasets", "bitsandbytes")))
    with tempfile.TemporaryDirectory(prefix="bench-first-step-") as name:
        starts = [_started(arguments, Path(name), number) for number in range(arguments.starts + 1)][1:]
    print("| seconds until | processor time | wall clock |\n| --- | --- | --- |")
    for words, own, wall in (
        ("training begins", "training_s", "training_wall_s"),
        ("first step", "step_s", "step_wall_s"),
    ):
        if getattr(starts[0], own) is not None:
            print(f"| {words} | {_spread([getattr(each, own) for each in starts])} | ", end="")
            print(f"{_spread([getattr(each, wall) for each in starts])} |")
    measuring.write_report(arguments, machine=machine, starts=[each._asdict() for each in starts])


def _spread(seconds: Sequence[float]) -> str:
    return f"{median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"


def _started(arguments: argparse.Namespace, folder: Path, number: int) -> Start:
    out, log = folder / f"run-{number}", folder / f"run-{number}.log"
    environment = os.environ | {
        "XDG_CACHE_HOME": str(folder / "cache"),
        "HF_DATASETS_CACHE": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    words = ["run", arguments.recipe, *arguments.set, "--out", str(out)]
    began = time.perf_counter()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "workbench.cli", *words], stdout=file, stderr=subprocess.STDOUT, env=environment
        )
        try:
            training: tuple[float | None, float | None] = None, None
            while not any(b"\n" in metrics.read_bytes() for metrics in out.rglob("metrics.jsonl")):
                if process.poll() is not None:
                    sys.exit(f"the command ended with status {process.returncode} before a step was written")
                if training[0] is None and b"Training:" in log.read_bytes():
                    training = _so_far(process, began)
                time.sleep(POLL_S)
            step = _so_far(process, began)
            return Start(training[0], step[0], training[1], step[1])
        finally:
            process.kill()
            process.wait()


def _so_far(process: subprocess.Popen[bytes], began: float) -> tuple[float, float]:
    """Processor time of a process, and seconds of the wall clock."""
    # From `utime` on, behind the name in brackets (proc_pid_stat(5)).
    user, system = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / TICKS, time.perf_counter() - began


def _arguments() -> argparse.Namespace:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("recipe", nargs="?", default="sft/quickstart", help="file or shipped name")
    found.add_argument("--starts", type=int, default=5, help="that count")
    found.add_argument("--core", type=int, default=0, help="the one that all run on")
    found.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further settings")
    found.add_argument("--json", type=Path, help="a file to write")
    return found.parse_args()


if __name__ == "__main__":
    main()
