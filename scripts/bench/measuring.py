"""What the benchmarks share: a process that is measured from outside, and the machine in words."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple


class Usage(NamedTuple):
    """What a process took."""

    wall_s: float
    cpu_s: float
    peak_bytes: int
    """Most memory that was resident, of this process alone."""


def run(command: Sequence[str], log: Path, device: str) -> Usage:
    """Run to the end; where it fails, show what it said and give up."""
    # A cache of its own for each run: none finds rows that the one before has tokenised.
    cache = log.with_suffix(".cache")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(cache), "XDG_CACHE_HOME": str(cache)}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    started = time.perf_counter()
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)  # reaped here, where Popen does not see it
    if process.returncode:
        tail = log.read_text(encoding="utf-8", errors="replace")[-4000:]
        sys.exit(f"{tail}\nfailed with status {process.returncode}: {' '.join(command)}")
    return Usage(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def machine(device: str, packages: Sequence[str]) -> str:
    """Processor, accelerator and versions, for the first line of a benchmark."""
    cpuinfo = dict(_cpuinfo())
    cores = len(os.sched_getaffinity(0))
    units = "with" if has_bfloat16_units() else "without"
    parts = [f"{cpuinfo.get('model name', platform.processor())}, {cores} cores, {units} bfloat16 units"]
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        parts.append(subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0])
    parts += [f"{package} {version(package)}" for package in packages]
    return "; ".join(parts)


def has_bfloat16_units() -> bool:
    """Whether the processor multiplies bfloat16 matrices in hardware."""
    flags = dict(_cpuinfo()).get("flags", "").split()
    return "avx512_bf16" in flags or "amx_bf16" in flags


def _cpuinfo() -> list[tuple[str, str]]:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return [(key.strip(), value.strip()) for key, _, value in (line.partition(":") for line in lines)]
