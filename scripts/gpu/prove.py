"""Run the tests of an accelerator and the benchmark, each bounded in time, and sum up what is known; see prove.sh."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGED = "tests/workbench/training/optim/test_optimizer_states.py::test_paged_states_go_on_to_the_same_bits"
TESTS = ("tests/gpu", PAGED)
"""Tests that need an accelerator."""
SHARE = 0.55
"""Share of the time of a call of both parts that the tests get."""
REHEARSED = ("workbench", "TRL tuned", "raw loop", "TRL packed", "Unsloth", "workbench packed, expandable segments")
"""Sides that a rehearsal runs."""
GRACE = 15
"""Seconds that a part is ended before its time, so that results are summed up."""


def main() -> None:
    arguments = _arguments()
    ends = time.monotonic() + arguments.seconds
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    status = 0
    if arguments.part in (None, "tests"):
        share = SHARE if arguments.part is None else 1.0
        rehearse = ("whole" if arguments.whole else "few") if arguments.rehearse else ""
        status |= _tests(arguments.names, out, (ends - time.monotonic()) * share - GRACE, rehearse=rehearse)
    if arguments.part in (None, "bench"):
        status |= _bench(arguments.names, out, ends - time.monotonic() - GRACE, rehearse=arguments.rehearse)
    (out / "summary.md").write_text("\n".join(_summary(out)) + "\n", encoding="utf-8")
    print((out / "summary.md").read_text(encoding="utf-8"))
    print(f"Results: {out}")
    sys.exit(status)


def _tests(names: Sequence[str], out: Path, seconds: float, *, rehearse: str) -> int:
    """Tests of an accelerator; a rehearsal runs on the CPU those that mean something there, with few or all cases."""
    environment = {**os.environ, "WORKBENCH_GPU_RESULTS": str((out / "tests.jsonl").resolve())}
    if rehearse:
        environment |= {"WORKBENCH_REHEARSAL": rehearse, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    paths = [str(ROOT / "tests" / "gpu" / name) for name in names] or [str(ROOT / path) for path in TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:timeout"]
    # Another torch than the pinned one may warn of what this one does not: no test fails for it.
    command += ["-W", "default", "-n0" if rehearse else "-n8"]
    return _run([*command, *paths], out / "tests.log", seconds, environment)


def _bench(names: Sequence[str], out: Path, seconds: float, *, rehearse: bool) -> int:
    """Cases of scripts/bench/gpu.py; a rehearsal takes one, and the sides that have all of the others."""
    bench = ROOT / "scripts" / "bench"
    path = os.pathsep.join([str(bench), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = list(names) or (["8b-nf4-ragged"] if rehearse else [])
    if rehearse:
        words += ["--rehearse", "--sides", *REHEARSED]
    command = [sys.executable, str(bench / "gpu.py"), *words, "--out", str(out), "--seconds", str(seconds)]
    return _run(command, out / "bench.log", seconds + GRACE / 2, {**os.environ, "PYTHONPATH": path})


def _run(command: Sequence[str], log: Path, seconds: float, environment: dict[str, str]) -> int:
    """Run to the end or until its time is over; what it says goes to a file and to who looks."""
    ends = time.monotonic() + seconds
    with log.open("a", encoding="utf-8") as file, log.open(encoding="utf-8") as shown:
        shown.seek(0, os.SEEK_END)
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=ROOT)
        while process.poll() is None and time.monotonic() < ends:
            print(shown.read(), end="", flush=True)
            time.sleep(0.2)
        if process.poll() is None:
            process.kill()
            process.wait()
            print(f"\nEnded after {seconds:.0f} s: {' '.join(command[:4])} ... Run the rest by its name.")
        print(shown.read(), end="", flush=True)
    return int(process.returncode != 0)


def _summary(out: Path) -> Iterator[str]:
    """Yield lines of Markdown on every result in the folder."""
    if (out / "tests.jsonl").exists():
        last = {line["test"]: line for line in map(json.loads, (out / "tests.jsonl").read_text().splitlines())}
        counts = Counter(line["outcome"] for line in last.values())
        yield "Tests: " + ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) + "."
        yield ""
        yield from (f"- failed: `{name}`" for name, line in last.items() if line["outcome"] == "failed")
        skipped = Counter(_reason(line) for line in last.values() if line["outcome"] == "skipped")
        yield from (f"- skipped {count}: {reason}" for reason, count in skipped.most_common())
        yield ""
    if (out / "gpu.md").exists():
        yield (out / "gpu.md").read_text(encoding="utf-8").strip()


def _reason(line: dict[str, Any]) -> str:
    return str(line.get("reason", "")).removeprefix("Skipped: ")


def _arguments() -> argparse.Namespace:
    found = argparse.ArgumentParser(prog="prove.sh")
    found.add_argument("part", nargs="?", choices=("tests", "bench"))
    found.add_argument("names", nargs="*", help="test files such as test_runs.py, or cases such as 8b-nf4-2k")
    found.add_argument("--rehearse", action="store_true", help="on this CPU, with tiny shapes")
    found.add_argument("--whole", action="store_true", help="with --rehearse, every test that a CPU can run")
    found.add_argument("--seconds", type=float, default=540)
    found.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu-results")))
    return found.parse_intermixed_args()


if __name__ == "__main__":
    main()
