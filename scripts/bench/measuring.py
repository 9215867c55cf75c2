"""The harness of all benchmarks.

Options, processes measured from outside, their ratios, and the machine in words. Runs that stand in a folder: what is
finished is not run again, what was cut off goes on; their spread over seeds, and the cost of predicting. Gains of arms
over a control at equal rows and at equal compute. A run up to its training, in whose place something is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from workbench.config import RunConfig

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


# Runs that stand in a folder


@dataclass(frozen=True)
class Wanted:
    """A run: a recipe, and what the command line changes of it."""

    recipe: Mapping[str, Any]
    words: Sequence[str] = ()
    """Overrides, key=value."""

    @property
    def text(self) -> str:
        """The recipe file."""
        from workbench.config.yaml_text import dump_yaml

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


def finish(
    wanted: Mapping[str, Wanted], folder: Path, *, jobs: int, device: str, timed: bool = False
) -> dict[str, Path]:
    """The run directories by name, all finished; `jobs` of them run at a time, each in a process of its own, which
    leaves PROCESSOR_TIMES where it is `timed`."""
    with ThreadPoolExecutor(jobs) as pool:
        start = partial(_timed if timed else _process, device=device)
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
    from scipy import stats  # not in the processes that are measured

    half = stats.t.ppf(0.975, len(gains) - 1) * gains.std(ddof=1) / len(gains) ** 0.5 if len(gains) > 1 else np.nan
    return float(gains.mean() - half), float(gains.mean() + half)


def interval(gains: npt.NDArray[np.float64], *, digits: int) -> str:
    """Mean of paired differences over seeds, and its 95 % interval by Student's t."""
    told, low, high = (f"{value:+.{digits}f}" for value in (gains.mean(), *ends(gains)))
    return f"{told} ({low} to {high})"


def step_s(run: Path) -> float:
    """Median seconds of a step of a finished run."""
    elapsed = [step["elapsed_s"] for step in steps(run)]
    return float(np.median(np.diff(elapsed)))


def predict(
    runs: Mapping[str, Path], rows: Sequence[Mapping[str, Any]], folder: Path, *, repeats: int, device: str
) -> dict[str, Cost]:
    """Cost of predicting a tenth of the rows and all of them with each run, in turn."""
    files = [write_rows(rows[::10], folder / "few.jsonl"), write_rows(rows, folder / "all.jsonl")]
    found: dict[str, tuple[list[Usage], list[Usage]]] = {name: ([], []) for name in runs}
    for _ in range(repeats):
        for name, trained in runs.items():
            for file, usages in zip(files, found[name], strict=True):
                said = folder / f"predicted-{name}-{file.stem}.csv"
                said.unlink(missing_ok=True)
                command = [sys.executable, "-m", "workbench.cli.verbs", "predict", str(trained), str(file)]
                command += ["--out", str(said)]
                usages.append(run(command, said.with_suffix(".log"), device))
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
    usage = run(command, out.with_name(f"{out.name}.log"), device)
    print(f"{out}: {usage.wall_s:.0f} s, {usage.peak_bytes / 1e9:.2f} GB", file=sys.stderr, flush=True)


def _timed(recipe: Path, words: Sequence[str], out: Path, *, device: str) -> None:
    """A run in a process of its own, from the start, which notes the processor time of its steps."""
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, str(Path(__file__).with_name("our_steps.py")), str(recipe), str(out), *words]
    usage = run(command, out.with_name(f"{out.name}.log"), device)
    print(f"{out}: {usage.cpu_s:.0f} s of a core, {usage.peak_bytes / 1e9:.2f} GB", file=sys.stderr, flush=True)


def _inside(recipe: Path, words: Sequence[str], out: Path) -> None:
    """A run in this process, from the start: of one that was cut off, the time is not known."""
    import workbench
    from workbench.recipes.tasks.classify import class_run  # noqa: F401 - imports take longer than short runs, and count for none

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


# Arms against a control that trains on every row, at several lengths. At equal compute an arm is compared with the
# control of as much processor time, between two of its lengths by the logarithm of the time.

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Arm:
    """Scores and costs of one arm, by seed, the same seeds in all arms."""

    scores: list[float]
    cpu_s: list[float]
    """Processor time of each run, with loading and scoring, which cost every arm the same."""


@dataclass(frozen=True)
class Control:
    """The control at several lengths; 1 is the one that arms are as long as."""

    lengths: Mapping[float, Arm]

    @property
    def fixed_s(self) -> float:
        """Processor time of a run of no step: the line through the shortest and the longest control."""
        (short, least), (long, most) = (
            (length, _median_s(self.lengths[length])) for length in (min(self.lengths), max(self.lengths))
        )
        return least - short * (most - least) / (long - short)

    def cost(self, arm: Arm) -> float:
        """Processor time of an arm, as a multiple of the control's."""
        return (_median_s(arm) - self.fixed_s) / (_median_s(self.lengths[1]) - self.fixed_s)

    def scores_at(self, cost: float) -> Floats | None:
        """Scores of a control of this cost, by seed; None beyond the lengths that ran."""
        known = sorted(self.lengths)
        if not known[0] <= cost <= known[-1]:
            return None
        by_seed = zip(*(self.lengths[length].scores for length in known), strict=True)
        return np.array([np.interp(np.log(cost), np.log(known), scores) for scores in by_seed])


def gains_table(
    control: Control, arms: Mapping[str, Arm], *, references: Mapping[str, str], score: str, sign: int, digits: int
) -> list[list[object]]:
    """Rows of a table with its head.

    Args:
        references: Of arms, another arm with as many rows, at random.
        score: Name of the score.
        sign: 1 where a higher score is better, -1 for a loss: gains are better where positive.
        digits: Of scores and gains.
    """
    head = [score, "cost", "gain over every row, equal rows", "at equal compute", "over as many rows at random"]
    rows: list[list[object]] = [["arm", *head]]
    base = np.asarray(control.lengths[1].scores)
    for length, each in sorted(control.lengths.items()):
        gain = "" if length == 1 else interval(sign * (np.asarray(each.scores) - base), digits=digits)
        steps = "every row" if length == 1 else f"every row, {length:g} times the steps"
        rows.append([steps, f"{np.mean(each.scores):.{digits}f}", f"{control.cost(each):.2f}", gain, "", ""])
    for name, each in arms.items():
        values, cost = np.asarray(each.scores), control.cost(each)
        other = arms[references[name]].scores if name in references else None
        rows.append(
            [
                name,
                f"{values.mean():.{digits}f}",
                f"{cost:.2f}",
                interval(sign * (values - base), digits=digits),
                _gain_over(values, control.scores_at(max(cost, min(control.lengths))), sign, digits) or "beyond",
                _gain_over(values, other, sign, digits),
            ]
        )
    return rows


def _gain_over(values: Floats, others: Sequence[float] | Floats | None, sign: int, digits: int) -> str:
    return "" if others is None else interval(sign * (values - np.asarray(others)), digits=digits)


def _median_s(arm: Arm) -> float:
    return float(np.median(arm.cpu_s))


# A run up to its training


class _MeasuredEnough(Exception):
    """Everything is measured."""


def intercepted(config: RunConfig, measure: Callable[[Any], None]) -> None:
    """Begin a run up to its training, of one adapter or of a bank, give that to `measure`, and end there."""
    from workbench.cli.console import Terminal
    from workbench.recipes.task import main_of
    from workbench.recipes.verbs import run as run_verb
    from workbench.runs import files, run_directory
    from workbench.training.bank_trainer import BankTrainer
    from workbench.training.trainer import Trainer

    def instead(fit: Trainer | BankTrainer) -> None:
        measure(fit)
        raise _MeasuredEnough

    own = Trainer.work, BankTrainer.work
    Trainer.work = BankTrainer.work = instead  # type: ignore[method-assign, assignment]
    try:
        with tempfile.TemporaryDirectory() as folder:
            run = run_directory.start(Path(folder) / "run", config, resume=False)
            files.write_json(run.path / "before.json", {})  # nothing is scored before training
            with suppress(_MeasuredEnough):
                main_of(config, run_verb.at_once)(config, run, Terminal(quiet=True))
            run.close()
    finally:
        Trainer.work, BankTrainer.work = own  # type: ignore[method-assign]
