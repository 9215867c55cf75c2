"""Whether the solver takes the fastest way that fits: twelve cases of which every way was run, as Markdown and JSON.

    python scripts/bench/solver.py [--json solver.json] [--only WORD ...]

Four configurations of the shipped starter on a CPU. Each is trained without recomputing, with elementwise operations
and with whole blocks recomputed, and with micro-batches from the largest to the longest row, while every storage of
torch counts (planning/counters.py). Three limits of memory make three cases of each configuration: enough for all
ways, half-way between the largest and the smallest micro-batch, and less than any way without checkpointing takes. The
solver knows the limit, and no run. Then all ways, and those that it took, are trained once more, each in a process of
its own and step by step in turns, so that whoever else uses the machine slows all of them alike: every step's processor
time is compared with the mean of the same step of all ways.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import measuring
import numpy as np

import workbench
from workbench.config.sections.basic_sections import Checkpointing
from workbench.data.batching import Indices
from workbench.planning.counters import MemoryLedger
from workbench.planning.dry_run import hold
from workbench.planning.plan import Plan
from workbench.planning.solver import SolverChoice, choose
from workbench.planning.step_time import timed
from workbench.recipes.load import load
from workbench.recipes.verbs.plans.plan import plan
from workbench.training import capacity
from workbench.training.trainer import Trainer

SHORT = (
    "data.limit=160",
    "data.held_out=0.1",
    "train.epochs=null",
    "evaluate.answers=0",
    "evaluate.every=null",
    "save.every=null",
)
capacity.FORWARD_TOKENS = 1
"""Scoring reads one row at a time, so that it is never what takes most: it is the same for all ways."""
PLANNED = 6
"""Steps of a run whose bytes are counted, and of its plan."""
STEPS, WARM_UP = 12, 2
"""Steps of a run that is timed, and how many of the first are left out."""
SHARES = (1.0, 0.5, 0.25, 0.0)
"""Where the micro-batches of the runs stand between the longest row and the largest micro-batch."""
READY_S = 900
"""Seconds in which all processes must have begun."""
TOLERANCE = 0.05
"""Share of processor time: ways that differ by less are equally fast."""


_KEEPING: tuple[Checkpointing, ...] = (False, "elementwise", True)


class Way(NamedTuple):
    checkpointing: Checkpointing
    tokens: int


CONFIGURATIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "lora, bfloat16": ("sft/quickstart", ("data.max_tokens=128", "model.weights=bfloat16", "batch.size=16")),
    "all weights, float32": (
        "sft/quickstart",
        ("data.max_tokens=192", "model.weights=float32", "adapter={method: full}", "batch.size=8"),
    ),
    "bottlenecks, float32": (
        "sft/quickstart",
        ("data.max_tokens=160", "model.weights=float32", "adapter={method: houlsby}", "batch.size=16"),
    ),
    "classes, lora, float32": ("classify/quickstart", ("model.weights=float32", "batch.size=32")),
}


def main() -> None:
    arguments = _arguments()
    rows: list[list[object]] = [
        ["case", "limit MB", "taken", "MB", "s a step", "fastest that fits", "s a step", "right"]
    ]
    found: dict[str, object] = {}
    for name in CONFIGURATIONS:
        if arguments.only and not any(word in name for word in arguments.only):
            continue
        peaks = {way: _peak(name, way) for way in _ways(name)}
        limits = _limits(peaks)
        taken = {limit: _taken(_choose(name, limit)) for limit in limits}
        peaks |= {way: _peak(name, way) for way in taken.values() if way not in peaks}
        seconds = _seconds_in_turns(name, list(peaks))
        for way, peak in peaks.items():
            print(name, *way, peak, f"{seconds[way]:.3f}", file=sys.stderr, flush=True)
        for limit, own in taken.items():
            best = min((way for way in peaks if peaks[way] <= limit), key=lambda way: seconds[way])
            right = peaks[own] <= limit and seconds[own] <= seconds[best] * (1 + TOLERANCE)
            cells = [_said(own), f"{peaks[own] / 1e6:.1f}", f"{seconds[own]:.3f}", _said(best), f"{seconds[best]:.3f}"]
            rows.append([name, f"{limit / 1e6:.1f}", *cells, "yes" if right else "no"])
            print(" | ".join(map(str, rows[-1])), flush=True)
        every = [[*way, peak, seconds[way]] for way, peak in peaks.items()]
        found[name] = {"ways": every, "taken": [[limit, *way] for limit, way in taken.items()]}
    print(measuring.markdown(rows))
    print(f"{sum(row[-1] == 'yes' for row in rows[1:])} of {len(rows) - 1}.")
    measuring.write_report(arguments, machine=measuring.machine("cpu", ("torch", "transformers", "peft")), found=found)


def _ways(name: str) -> list[Way]:
    planned = _largest(name)
    least, most = planned.longest, planned.tokens_per_device
    tokens = sorted({least + int(share * (most - least)) for share in SHARES}, reverse=True)
    return [Way(checkpointing, count) for checkpointing in _KEEPING for count in tokens]


@cache
def _largest(name: str) -> Plan:
    recipe, words = CONFIGURATIONS[name]
    return plan(load(recipe, [*words, *SHORT, f"train.steps={PLANNED}"]))


def _limits(peaks: dict[Way, int]) -> list[int]:
    """Enough for all, for some micro-batches, and for none without checkpointing."""
    plain = [peak for way, peak in peaks.items() if not way.checkpointing]
    return [int(1.05 * max(plain)), (max(plain) + min(plain)) // 2, (min(plain) + min(peaks.values())) // 2]


def _choose(name: str, limit: int) -> SolverChoice:
    """Tensors alone count: what Python takes is nothing that one way has and another has not."""
    recipe, words = CONFIGURATIONS[name]
    return choose(
        load(recipe, [*words, *SHORT, f"train.steps={PLANNED}"]),
        lambda config: replace(plan(config, memory=limit), process=0),
        lambda each: timed(each.work, each.dry_run.flops_per_token, clock=time.process_time),
    )


def _taken(choice: SolverChoice) -> Way:
    config = choice.require().config
    assert isinstance(config.batch.tokens_per_device, int)
    return Way(config.train.checkpointing, config.batch.tokens_per_device)


def _peak(name: str, way: Way) -> int:
    """Bytes that a run holds at most, of as many steps as are planned."""
    with _counting() as peaks, tempfile.TemporaryDirectory() as folder:
        _train(name, way, Path(folder), steps=PLANNED)
    return max(peaks)


def _seconds_in_turns(name: str, ways: list[Way]) -> dict[Way, float]:
    """Processor time of a step of each way."""
    together = multiprocessing.get_context("fork")
    turns = [together.Semaphore(0) for _ in ways]
    ready, found = together.Barrier(len(ways) + 1, timeout=READY_S), together.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            together.Process(target=_train_in_turns, args=(name, way, number, Path(folder), turns, ready, found))
            for number, way in enumerate(ways)
        ]
        for process in processes:
            process.start()
        ready.wait()
        turns[0].release()
        taken = dict(found.get() for _ in ways)
        for process in processes:
            process.kill()
            process.join()
    seconds_WS = np.asarray([taken[number][WARM_UP:] for number in range(len(ways))])
    share_W = np.median(seconds_WS / seconds_WS.mean(0), axis=1)
    return dict(zip(ways, (share_W * np.median(seconds_WS.mean(0))).tolist(), strict=True))


def _train_in_turns(name: str, way: Way, number: int, folder: Path, turns: Any, ready: Any, value: Any) -> None:
    """One of several processes, each of which does a step when its turn is."""
    seconds: list[float] = []
    step = Trainer.step

    def timed(self: Trainer, rows: Indices) -> dict[str, Any]:
        if not seconds:
            ready.wait()
        turns[number].acquire()
        began = time.process_time()
        record = step(self, rows)
        seconds.append(time.process_time() - began)
        turns[(number + 1) % len(turns)].release()
        if len(seconds) == STEPS:
            value.put((number, seconds))
            time.sleep(READY_S)  # until it is killed: scoring would disturb the others
        return record

    Trainer.step = timed  # type: ignore[method-assign]
    _train(name, way, folder / str(number), steps=STEPS)


def _train(name: str, way: Way, folder: Path, *, steps: int) -> None:
    recipe, words = CONFIGURATIONS[name]
    own = [f"train.checkpointing={str(way.checkpointing).lower()}", f"batch.tokens_per_device={way.tokens}"]
    workbench.run(recipe, [*words, *SHORT, *own, f"train.steps={steps}"], out=folder / "run", quiet=True)


@contextmanager
def _counting() -> Iterator[list[int]]:
    """Inside the block, the peak of every training in bytes."""
    peaks: list[int] = []
    work = Trainer.work

    def counted(self: Trainer) -> None:
        with MemoryLedger() as ledger:
            hold(ledger, self)
            work(self)
        peaks.append(ledger.peak)

    Trainer.work = counted  # type: ignore[method-assign]
    try:
        yield peaks
    finally:
        Trainer.work = work  # type: ignore[method-assign]


def _said(way: Way) -> str:
    return f"{way.tokens} tokens{f', checkpointing={way.checkpointing}' if way.checkpointing else ''}"


def _arguments() -> argparse.Namespace:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--only", nargs="*", default=[], help="configurations with one of these words in their name")
    found.add_argument("--json", type=Path, help="a file to write")
    return found.parse_args()


if __name__ == "__main__":
    main()
