"""Runs of this workbench that stand in a folder: what is finished is not run again, what was cut off goes on.

Also what comes of them over seeds, and what predicting with them costs.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import measuring
import numpy as np
import numpy.typing as npt
from measuring import Usage
from scipy import stats

from workbench.config.yaml_text import dump_yaml


@dataclass(frozen=True)
class Wanted:
    """A run: a recipe, and what the command line changes of it."""

    recipe: Mapping[str, Any]
    words: Sequence[str] = ()
    """Overrides, key=value."""

    @property
    def text(self) -> str:
        """The recipe file."""
        return f"# {' '.join(self.words)}\n{dump_yaml(self.recipe)}"


@dataclass(frozen=True)
class Spread:
    """Mean and spread over seeds."""

    mean: float
    sd: float | None
    """Sample standard deviation; None of a single value."""
    values: list[float]

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Spread of these values."""
        return cls(mean(values), stdev(values) if len(values) > 1 else None, list(values))

    def __str__(self) -> str:
        return f"{self.mean:.3f}" if self.sd is None else f"{self.mean:.3f} ± {self.sd:.3f}"


@dataclass(frozen=True)
class Cost:
    """Time and memory of `workbench predict`, each time."""

    rows: tuple[int, int]
    few: list[Usage]
    """For the first number of rows."""
    many: list[Usage]
    """For the second."""
    wall_s: float
    """For 1,000 rows, start and loading left out: what more rows add to the median."""
    cpu_s: float
    """The same of processor time, which says more on a busy machine."""

    @classmethod
    def of(cls, rows: tuple[int, int], few: list[Usage], many: list[Usage]) -> Cost:
        """Cost from these measurements."""
        wall_s = median(usage.wall_s for usage in many) - median(usage.wall_s for usage in few)
        cpu_s = median(usage.cpu_s for usage in many) - median(usage.cpu_s for usage in few)
        thousands = (rows[1] - rows[0]) / 1000
        return cls(rows, few, many, wall_s / thousands, cpu_s / thousands)

    def __str__(self) -> str:
        return f"{self.wall_s:.2f} ({self.cpu_s:.2f})"


def finish(wanted: Mapping[str, Wanted], folder: Path, *, jobs: int, device: str) -> dict[str, Path]:
    """The run directories by name, all finished; `jobs` of them run at a time, each in a process of its own."""
    with ThreadPoolExecutor(jobs) as pool:
        start = partial(_process, device=device)
        runs = {name: pool.submit(_finished, run, folder / name, start) for name, run in wanted.items()}
        try:
            return {name: run.result() for name, run in runs.items()}
        except SystemExit:  # one failed and said why: those that wait are not started
            pool.shutdown(cancel_futures=True)
            raise


def finish_here(wanted: Mapping[str, Wanted], folder: Path) -> dict[str, Path]:
    """As `finish`, one after another in this process, which spares short runs their start; `cpu_s` is known of each."""
    return {name: _finished(run, folder / name, _inside) for name, run in wanted.items()}


def cpu_s(run: Path) -> float:
    """Processor time of a run of `finish_here`."""
    found: float = json.loads(run.with_name(f"{run.name}.json").read_text(encoding="utf-8"))["cpu_s"]
    return found


def scores(run: Path) -> dict[str, dict[str, float]]:
    """Scores of a finished run."""
    found: dict[str, dict[str, float]] = json.loads((run / "scores.json").read_text(encoding="utf-8"))
    return found


def ends(gains: npt.NDArray[np.float64]) -> tuple[float, float]:
    """The 95 % interval of the mean of paired differences over seeds, by Student's t."""
    half = stats.t.ppf(0.975, len(gains) - 1) * gains.std(ddof=1) / len(gains) ** 0.5 if len(gains) > 1 else np.nan
    return float(gains.mean() - half), float(gains.mean() + half)


def interval(gains: npt.NDArray[np.float64], *, digits: int) -> str:
    """Mean of paired differences over seeds, and its 95 % interval by Student's t."""
    told, low, high = (f"{value:+.{digits}f}" for value in (gains.mean(), *ends(gains)))
    return f"{told} ({low} to {high})"


def step_s(run: Path) -> float:
    """Median seconds of a step of a finished run."""
    elapsed = [step["elapsed_s"] for step in measuring.steps(run)]
    return float(np.median(np.diff(elapsed)))


def predict(
    runs: Mapping[str, Path], rows: Sequence[Mapping[str, Any]], folder: Path, *, repeats: int, device: str
) -> dict[str, Cost]:
    """Cost of predicting a tenth of the rows and all of them with each run, in turn."""
    files = [write_rows(rows[::10], folder / "few.jsonl"), write_rows(rows, folder / "all.jsonl")]
    found: dict[str, tuple[list[Usage], list[Usage]]] = {name: ([], []) for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            for file, usages in zip(files, found[name], strict=True):
                said = folder / f"predicted-{name}-{file.stem}.csv"
                said.unlink(missing_ok=True)
                command = [
                    sys.executable,
                    "-m",
                    "workbench.cli.verbs",
                    "predict",
                    str(run),
                    str(file),
                    "--out",
                    str(said),
                ]
                usages.append(measuring.run(command, said.with_suffix(".log"), device))
    return {name: Cost.of((len(rows[::10]), len(rows)), *usages) for name, usages in found.items()}


def write_rows(rows: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """A jsonl file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def markdown(rows: Sequence[Sequence[object]]) -> str:
    """A table; the first row is its head."""
    head, *body = [[str(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body))


def _finished(wanted: Wanted, out: Path, start: Callable[[Path, Sequence[str], Path], None]) -> Path:
    recipe = out.with_name(f"{out.name}.yaml")
    if recipe.exists() and recipe.read_text(encoding="utf-8") != wanted.text:
        sys.exit(f"{recipe} stands there with other settings. Remove it and {out}, or name another --out.")
    if _is_done(out):
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    recipe.write_text(wanted.text, encoding="utf-8")
    start(recipe, wanted.words, out)
    # Dozens of optimizer states and tokenised sets that nobody will ask for.
    shutil.rmtree(out / "checkpoints", ignore_errors=True)
    shutil.rmtree(out.with_name(f"{out.name}.cache"), ignore_errors=True)
    return out


def _process(recipe: Path, words: Sequence[str], out: Path, *, device: str) -> None:
    """A run in a process of its own."""
    command = [sys.executable, "-m", "workbench.cli.verbs", "run", str(recipe), *words, "--out", str(out)]
    command += ["--resume"] if (out / "config.yaml").exists() else []
    usage = measuring.run(command, out.with_name(f"{out.name}.log"), device)
    print(f"{out}: {usage.wall_s:.0f} s, {usage.peak_bytes / 1e9:.2f} GB", file=sys.stderr, flush=True)


def _inside(recipe: Path, words: Sequence[str], out: Path) -> None:
    """A run in this process, from the start: of one that was cut off, the time is not known."""
    import workbench
    from workbench.recipes.labels import classify  # noqa: F401 - imports take longer than short runs, and count for none

    shutil.rmtree(out, ignore_errors=True)
    began = time.process_time()
    log = out.with_name(f"{out.name}.log")
    with log.open("w", encoding="utf-8") as said, redirect_stdout(said), redirect_stderr(said):
        workbench.run(recipe, words, out=out, quiet=True)
    took = time.process_time() - began
    out.with_name(f"{out.name}.json").write_text(json.dumps({"cpu_s": took}), encoding="utf-8")
    print(f"{out}: {took:.0f} s", file=sys.stderr, flush=True)


def _is_done(out: Path) -> bool:
    manifest = out / "manifest.json"
    return manifest.exists() and json.loads(manifest.read_text(encoding="utf-8")).get("status") == "done"
