"""Steps over bfloat16, nf4 and int8 weights in turn, over the same rows: processor time as ratios, and memory.

    python scripts/bench/quantised.py [--model NAME=FOLDER ...] [--encoder FOLDER] [--steps 12] [--only WORD ...]

--model is a causal model, such as those of random_llama.py, --encoder a sentence encoder such as all-MiniLM-L6-v2.
Every format trains in a process of its own as `workbench run` does; its callback waits after each step until all
others have taken theirs. Processor time is that of the process's threads, and waiting takes none.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import measuring

from workbench.recipes.load import load
from workbench.recipes.verbs.run import run

FORMATS = ("bfloat16", "nf4", "int8")
SHORT = ["train.epochs=null", "evaluate={every: null, answers: 0}", "save={every: null}", "adapter.method=lora"]


class Step(NamedTuple):
    """A step over one format."""

    processor_s: float
    """From the end of the step before to the end of this one, of all threads."""
    loss: float
    peak_bytes: int
    """Most memory that was resident so far, of the whole process."""


class Turns:
    """A callback that tells of each step, and goes on when it is told to."""

    def __init__(self, parent: Connection) -> None:
        self.parent, self.began = parent, 0.0

    def say(self, text: str) -> None:
        if text.startswith("Training:"):
            self._wait()

    def step(self, record: dict[str, Any], *, total: int) -> None:
        self.parent.send(Step(time.process_time() - self.began, record["loss"], record["peak_bytes"]))
        if record["step"] == total:
            os._exit(0)  # nothing is to be scored
        self._wait()

    def stop_requested(self) -> bool:
        return False

    def _wait(self) -> None:
        self.parent.recv()
        self.began = time.process_time()


def main() -> None:
    arguments = _arguments()
    columns = [f"{name}: {what}" for name in arguments.formats for what in ("s", "times the first", "peak MB")]
    rows: list[list[object]] = [["task", *columns]]
    found = {}
    for name, (recipe, words) in _tasks(arguments).items():
        if arguments.only and not any(word in name for word in arguments.only):
            continue
        found[name] = steps = _in_turn(recipe, [*words, *SHORT, *arguments.set], arguments)
        first = steps[arguments.formats[0]]
        row: list[object] = [name]
        for taken in steps.values():
            ratio = measuring.ratio([each.processor_s for each in taken], [each.processor_s for each in first])
            seconds = median(each.processor_s for each in taken)
            row += [f"{seconds:.3f}", str(ratio), f"{taken[-1].peak_bytes / 1e6:.0f}"]
        rows.append(row)
        print(" | ".join(map(str, row)), flush=True)
    print(measuring.markdown(rows))
    measuring.write_report(
        arguments, machine=measuring.machine("cpu", ("torch", "transformers", "peft", "bitsandbytes")), found=found
    )


def _in_turn(recipe: str, words: list[str], arguments: argparse.Namespace) -> dict[str, list[Step]]:
    """Steps of each format behind the first ones, which allocate and tune."""
    formats, total = arguments.formats, arguments.steps + measuring.WARM_UP
    words = [*words, f"train.steps={total}"]
    steps: dict[str, list[Step]] = {name: [] for name in formats}
    with tempfile.TemporaryDirectory() as folder, _processes(recipe, words, formats, Path(folder)) as processes:
        for _ in range(total):
            for name, process in processes.items():
                process.send(None)
                steps[name].append(process.recv())
    return {name: taken[measuring.WARM_UP :] for name, taken in steps.items()}


@contextmanager
def _processes(recipe: str, words: list[str], formats: list[str], folder: Path) -> Iterator[dict[str, Connection]]:
    """A process for each format, about to take its first step."""
    context, ends, started = get_context("spawn"), {}, []
    for name in formats:
        ends[name], theirs = context.Pipe()
        given = (theirs, recipe, [*words, f"model.weights={name}"], folder / name)
        started.append(context.Process(target=_train, args=given, daemon=True))
        started[-1].start()
        theirs.close()  # so that its end is an error here
    yield ends
    for process in started:
        process.join()


def _train(parent: Connection, recipe: str, words: list[str], out: Path) -> None:
    run(load(recipe, words), out=out, resume=False, callback=Turns(parent))


def _tasks(arguments: argparse.Namespace) -> dict[str, tuple[str, list[str]]]:
    """Recipe and overrides by name."""
    found: dict[str, tuple[str, list[str]]] = {"starter": ("sft/quickstart", [])}
    for each in arguments.model:
        name, _, folder = each.partition("=")
        found[name] = ("sft/quickstart", [f"model.id={folder}", "batch.size=8"])
    if arguments.encoder:
        found["MiniLM, classes"] = ("classify/quickstart", [f"model.id={arguments.encoder}"])
    return found


def _arguments() -> argparse.Namespace:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--encoder", help="folder or hub id of a sentence encoder; int8 refuses some of their heads")
    found.add_argument("--model", nargs="*", default=[], metavar="NAME=FOLDER", help="causal models")
    found.add_argument("--formats", nargs="*", default=list(FORMATS), help="the first is what others are compared with")
    found.add_argument("--only", nargs="*", default=[], help="tasks with one of these words in their name")
    found.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further settings")
    found.add_argument("--steps", type=int, default=12, help="measured steps")
    found.add_argument("--json", type=Path, help="a file to write")
    return found.parse_args()


if __name__ == "__main__":
    main()
