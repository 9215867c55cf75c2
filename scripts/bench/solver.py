"""Whether the solver takes the fastest way that fits: twelve cases of which every way was run, as Markdown and JSON.

    python scripts/bench/solver.py [--json solver.json] [--only WORD ...]

Four configurations of the shipped starter on a CPU. Each is trained with and without checkpointing and with
micro-batches from the largest to the longest row, twice: once every storage of torch counts (workbench/live_bytes.py),
once the processor time of each step does. Three limits of memory make three cases of each configuration: enough for all
ways, half-way between the largest and the smallest micro-batch, and less than any way without checkpointing takes. The
solver knows the limit and none of the runs. What it takes is run, too, in turns with the way that was fastest.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from statistics import median
from typing import NamedTuple

import measuring
import standing
import torch

import workbench
from workbench.data.batching import Indices
from workbench.engine import Fit
from workbench.evaluation import predicting, scores
from workbench.planning.calibration import Calibration
from workbench.planning.ledger import Ledger
from workbench.planning.plan import Plan
from workbench.planning.rehearsal import hold
from workbench.planning.solver import Choice, choose
from workbench.recipes.load import load
from workbench.recipes.plan import plan

SHORT = (
    "data.limit=160",
    "data.held_out=0.1",
    "train.epochs=null",
    "evaluate.answers=0",
    "evaluate.every=null",
    "save.every=null",
)
scores.TOKENS = predicting.TOKENS = 1
"""Scoring reads one row at a time, so that it is never what takes most: it is the same for all ways."""
STEPS, WARM_UP = 6, 2
"""Of a run, and how many of them are not timed."""
SHARES = (1.0, 0.5, 0.25, 0.0)
"""Where the micro-batches of the runs stand between the longest row and the largest micro-batch."""
TURNS = 3
"""Of a way that was taken and the fastest, where these differ."""
TOLERANCE = 0.05
"""Of processor time: ways that differ by less are equally fast."""


class Way(NamedTuple):
    checkpointing: bool
    tokens: int


class Took(NamedTuple):
    peak: int
    """Bytes."""
    seconds: float
    """Of processor time, a step."""


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
        every: dict[Way, Took] = {}
        for way in _ways(name):
            every[way] = _run(name, way)
            print(name, *way, *every[way], file=sys.stderr, flush=True)
        for limit in _limits(every):
            case = f"{name}, {limit / 1e6:.0f} MB"
            taken = _taken(_choose(name, limit))
            own = every.get(taken) or _run(name, taken)
            best = min((way for way in every if every[way].peak <= limit), key=lambda way: every[way].seconds)
            took, least = (own.seconds, own.seconds) if taken == best else _compared(name, taken, best)
            right = own.peak <= limit and took <= least * (1 + TOLERANCE)
            cells = [_said(taken), f"{own.peak / 1e6:.1f}", f"{took:.2f}", _said(best)]
            rows.append([name, f"{limit / 1e6:.1f}", *cells, f"{least:.2f}", "yes" if right else "no"])
            found[case] = {"taken": taken, "took": own, "best": best, "all": [[*way, *every[way]] for way in every]}
            print(" | ".join(map(str, rows[-1])), flush=True)
    print(standing.markdown(rows))
    print(f"{sum(row[-1] == 'yes' for row in rows[1:])} of {len(rows) - 1}.")
    measuring.write_report(arguments, machine=measuring.machine("cpu", ("torch", "transformers", "peft")), found=found)


def _ways(name: str) -> list[Way]:
    planned = _largest(name)
    least, most = planned.longest, planned.tokens_per_device
    tokens = sorted({least + int(share * (most - least)) for share in SHARES}, reverse=True)
    return [Way(checkpointing, count) for checkpointing in (False, True) for count in tokens]


@cache
def _largest(name: str) -> Plan:
    recipe, words = CONFIGURATIONS[name]
    return plan(load(recipe, [*words, *SHORT, f"train.steps={STEPS}"]))


def _limits(every: dict[Way, Took]) -> list[int]:
    """Enough for all, for some micro-batches, and for none without checkpointing."""
    plain = [took.peak for way, took in every.items() if not way.checkpointing]
    saved = min(took.peak for took in every.values())
    return [int(1.05 * max(plain)), (max(plain) + min(plain)) // 2, (min(plain) + saved) // 2]


def _choose(name: str, limit: int) -> Choice:
    """Tensors alone count: what Python takes is nothing that one way has and another has not."""
    recipe, words = CONFIGURATIONS[name]
    clock = Calibration(torch.device("cpu"), clock=time.process_time)
    return choose(
        load(recipe, [*words, *SHORT, f"train.steps={STEPS}"]),
        lambda config: replace(plan(config, memory=limit), process=0),
        lambda found: clock.timed(found.work).seconds,
    )


def _taken(choice: Choice) -> Way:
    config = choice.require().config
    assert isinstance(config.batch.tokens_per_device, int)
    return Way(config.train.checkpointing is True, config.batch.tokens_per_device)


def _run(name: str, way: Way) -> Took:
    recipe, words = CONFIGURATIONS[name]
    own = _words(way)
    with _counting() as peaks:
        _train(recipe, [*words, *SHORT, *own, f"train.steps={STEPS}"])
    return Took(max(peaks), median(_seconds(name, way)))


def _compared(name: str, one: Way, other: Way) -> tuple[float, float]:
    """Seconds of a step of both, run by turns: others use the machine, too."""
    turns = [(_seconds(name, one), _seconds(name, other)) for _ in range(TURNS)]
    return median(chain.from_iterable(own for own, _ in turns)), median(chain.from_iterable(own for _, own in turns))


def _seconds(name: str, way: Way) -> list[float]:
    """Of each step that is timed."""
    recipe, words = CONFIGURATIONS[name]
    with _timing() as seconds:
        _train(recipe, [*words, *SHORT, *_words(way), f"train.steps={STEPS}"])
    return seconds[WARM_UP:]


def _train(recipe: str, words: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        workbench.run(recipe, words, out=Path(folder) / "run", quiet=True)


@contextmanager
def _counting() -> Iterator[list[int]]:
    """Inside the block, the peak of every training in bytes."""
    peaks: list[int] = []
    work = Fit.work

    def counted(self: Fit) -> None:
        with Ledger() as ledger:
            hold(ledger, self)
            work(self)
        peaks.append(ledger.peak)

    Fit.work = counted  # type: ignore[method-assign]
    try:
        yield peaks
    finally:
        Fit.work = work  # type: ignore[method-assign]


@contextmanager
def _timing() -> Iterator[list[float]]:
    """Inside the block, the processor time of every step in seconds."""
    seconds: list[float] = []
    step = Fit.step

    def timed(self: Fit, rows: Indices) -> dict[str, object]:
        began = time.process_time()
        record = step(self, rows)
        seconds.append(time.process_time() - began)
        return record

    Fit.step = timed  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        Fit.step = step  # type: ignore[method-assign]


def _words(way: Way) -> list[str]:
    return [f"train.checkpointing={str(way.checkpointing).lower()}", f"batch.tokens_per_device={way.tokens}"]


def _said(way: Way) -> str:
    return f"{way.tokens} tokens{', checkpointing' if way.checkpointing else ''}"


def _arguments() -> argparse.Namespace:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--only", nargs="*", default=[], help="configurations with one of these words in their name")
    found.add_argument("--json", type=Path, help="a file to write")
    return found.parse_args()


if __name__ == "__main__":
    main()
