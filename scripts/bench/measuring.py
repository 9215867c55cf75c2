"""Common parts of the benchmarks: options, processes measured from outside, their ratios, the machine in words."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

WARM_UP = 2
"""Steps at the start that do not count: they allocate, tune and compile."""
PROCESSOR_TIMES = "processor_s.json"
"""File of a run: processor time of its process at the end of each step, in seconds."""


class Usage(NamedTuple):
    """Time and memory of a process."""

    wall_s: float
    cpu_s: float
    peak_bytes: int
    """Most memory that was resident, of this process alone."""


class Ratio(NamedTuple):
    """One side through the other."""

    of_medians: float
    low: float
    """Lowest ratio of the single pairs of runs; `high` is the highest."""
    high: float

    def __str__(self) -> str:
        return f"{self.of_medians:.2f} (pairs {self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True)
class Training:
    """One run of training, measured from outside and by its own metrics.jsonl."""

    name: str
    tokens_per_second: float
    """Tokens without padding, median of the warm steps; by the clock that --clock names."""
    wall_s: float
    """The whole process: imports, loading, tokenising, training, and for ours also scoring and the report."""
    train_s: float
    """All steps, the first ones too."""
    peak_bytes: int
    """Most memory: resident, of the whole process; on a GPU what torch had allocated there."""
    loss: float
    """Mean over the last quarter of the steps, in nats per supervised token."""
    tokens: int
    supervised_tokens: int

    HEADER = (
        f"{'':10} {'tokens/s':>10} {'wall s':>9} {'train s':>9} {'peak GB':>9} {'last loss':>10} {'tokens':>9} "
        f"{'with loss':>10}"
    )

    def __str__(self) -> str:
        return (
            f"{self.name:10} {self.tokens_per_second:10,.0f} {self.wall_s:9.1f} {self.train_s:9.1f} "
            f"{self.peak_bytes / 1e9:9.2f} {self.loss:10.3f} {self.tokens:9,} {self.supervised_tokens:10,}"
        )


def parser(description: str) -> argparse.ArgumentParser:
    """With the options that every benchmark of two or more sides has."""
    found = argparse.ArgumentParser(
        description=description.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    found.add_argument("--pairs", type=int, default=2, help="runs of each side")
    found.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    found.add_argument("--json", type=Path, help="write everything that was measured to this file")
    return found


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


def lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects in the lines of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def steps(out: Path) -> list[dict[str, Any]]:
    """The figures of each step that a training left in `out`."""
    return lines(out / "metrics.jsonl")


def last_line(log: Path) -> dict[str, Any]:
    """The JSON object that a process wrote last."""
    return dict(json.loads(log.read_text(encoding="utf-8").splitlines()[-1]))


def train(name: str, command: Sequence[str], out: Path, arguments: argparse.Namespace) -> Training:
    """Run a command that leaves a metrics.jsonl in `out`, and for the processor's clock the times of PROCESSOR_TIMES.

    Its log stands beside that folder.
    """
    device: str = arguments.device
    usage = run(command, out.with_suffix(".log"), device)
    figures = steps(out)
    ends: list[float] = [step["elapsed_s"] for step in figures]
    if arguments.clock == "processor":
        ends = json.loads((out / PROCESSOR_TIMES).read_text(encoding="utf-8"))
    rates = [step["tokens"] / (end - start) for step, start, end in zip(figures[1:], ends[:-1], ends[1:], strict=True)]
    last = figures[-max(1, len(figures) // 4) :]
    supervised = sum(step["supervised_tokens"] for step in last)
    return Training(
        name=name,
        tokens_per_second=median(rates[WARM_UP - 1 :]),
        wall_s=usage.wall_s,
        train_s=figures[-1]["elapsed_s"],
        peak_bytes=usage.peak_bytes if device == "cpu" else max(step["peak_bytes"] for step in figures),
        loss=sum(step["loss"] * step["supervised_tokens"] for step in last) / supervised,
        tokens=sum(step["tokens"] for step in figures),
        supervised_tokens=sum(step["supervised_tokens"] for step in figures),
    )


def in_turn(
    sides: Mapping[str, Callable[[Path], Sequence[str]]], folder: Path, arguments: argparse.Namespace
) -> list[Training]:
    """Run the commands of two sides in turn, as often as --pairs says, and show each; all see the same tokens.

    Args:
        sides: From the folder that a run writes to its command, by name.
    """
    results: list[Training] = []
    print(Training.HEADER)
    for pair in range(arguments.pairs):
        for name, command in sides.items():
            out = folder / f"{name}-{pair}"
            results.append(train(name, command(out), out, arguments))
            print(results[-1], flush=True)
            counts = {result.name: (result.tokens, result.supervised_tokens) for result in results}
            if len(set(counts.values())) > 1:
                sys.exit(f"not the same work, so no ratio (tokens, tokens with loss): {counts}")
    return results


def ratios(results: Sequence[Training]) -> dict[str, Ratio]:
    """The first side through the second, of runs in turn."""
    pairs = list(zip(results[::2], results[1::2], strict=True))
    return {
        field: ratio(*([getattr(pair[side], field) for pair in pairs] for side in (0, 1)))
        for field in ("tokens_per_second", "wall_s", "train_s", "peak_bytes", "loss")
    }


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Ours through theirs; runs at the same place are a pair."""
    single = [our / their for our, their in zip(ours, theirs, strict=True)]
    return Ratio(median(ours) / median(theirs), min(single), max(single))


def summary(ratios: Mapping[str, Ratio], results: Sequence[Training]) -> str:
    """The line of ratios under the runs, and two of them in words."""
    ours, theirs = (result.name for result in results[:2])
    return "\n".join(
        [
            f"{'ratio':10} {ratios['tokens_per_second'].of_medians:10.2f} {ratios['wall_s'].of_medians:9.2f} "
            f"{ratios['train_s'].of_medians:9.2f} {ratios['peak_bytes'].of_medians:9.2f} "
            f"{ratios['loss'].of_medians:10.2f}",
            "",
            f"{ours}: {ratios['tokens_per_second']} times the tokens/s of {theirs}, {ratios['peak_bytes']} times its "
            f"peak memory; medians of {len(results) // 2}.",
        ]
    )


def write_report(arguments: argparse.Namespace, **facts: Any) -> None:
    """Write the measurements and the arguments, where --json names a file."""
    if arguments.json:
        text = json.dumps({**facts, "arguments": vars(arguments)}, default=_plain, indent=2)
        arguments.json.write_text(text + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else asdict(value)


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


def group(pattern: str | None, name: str) -> str:
    """The part of a file's name that the pattern's first group finds; the whole name where there is none."""
    found = re.match(pattern, name) if pattern else None
    return found[1] if found else name
