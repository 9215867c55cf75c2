"""Effect of each technique of training on two backbones and two tasks, at equal steps and at equal time, paired seeds.

    python scripts/bench/efficient.py --encoder FOLDER [--only regularise] [--seeds 3] [--out FOLDER] [--json FILE]

The tasks are shipped ones made short: sft/quickstart on its shortest questions, some passes over few of them, so that
the starter (6 M parameters) begins to learn rows by heart; and classify/quickstart with the encoder, on few rows of its
20 intents. Each arm is the control, LoRA with AdamW, and one technique more, in as many steps. Processor time beside
that is what the technique costs: at equal time it is compared with the best control that takes no longer, between its
lengths by the logarithm. Gains are positive where the technique is better, with 95 % intervals over paired seeds. Runs
stand below --out, in this process one after another, seed by seed; what is finished is not run again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import equal_compute
import measuring
import numpy as np
import standing
from equal_compute import Arm, Control
from standing import Wanted

from workbench import recipes
from workbench.config.yaml_text import read_yaml
from workbench.data import starter

LENGTHS = (0.5, 1.0, 2.5)
"""Steps of the runs of the control, as multiples of its own."""
STEPS = 40
NOISE = 0.1
"""So far from 1 a cost counts as 1: as much do equal runs differ on a busy machine."""


@dataclass(frozen=True)
class Task:
    """A shipped recipe made short, and how its runs are scored."""

    recipe: str
    words: tuple[str, ...]
    scores: Mapping[str, float]
    """Names in scores.json, each with the factor by which more of it is better, in the unit of the table."""
    own: Mapping[str, str]
    """Settings that have another name in this recipe; of those with an empty one there are none."""
    refused: tuple[str, ...] = ()
    """Techniques that the workbench refuses for its backbone."""


SHARED = (f"train.steps={STEPS}", "train.epochs=null", "evaluate.every=null", "save.every=null")
TASKS = {
    "questions": Task(
        "sft/quickstart",
        ("data.train={out}/train.jsonl", "data.held_out={out}/held_out.jsonl", "batch.size=4", "evaluate.answers=0"),
        {"loss": -1.0},
        {},
    ),
    "intents": Task(
        "classify/quickstart",
        ("model.id={encoder}", "data.limit=240", "batch.size=16", "evaluate.probe=0", "evaluate.dynamics=false"),
        {"loss": -1.0, "accuracy": 100.0},
        {"regularise.label_smoothing": "classes.smoothing", "regularise.z_loss": ""},
        ("block expansion, every 4",),  # BERT normalises what its blocks have added
    ),
}
TRAIN_ROWS, HELD_OUT_ROWS = 64, 48
"""The shortest of the questions."""
ARMS: dict[str, dict[str, list[str]]] = {
    "freeze": {
        "half of the blocks frozen": ["freeze.policy=static"],
        "autofreeze": ["freeze.policy=autofreeze", "freeze.every=5"],
        "egeria": ["freeze.policy=egeria", "freeze.every=5"],
        "smartfrz": ["freeze.policy=smartfrz", "freeze.every=5"],
    },
    "thinning": {
        "progressive layer dropping, 0.5": ["layer_drop.rate=0.5"],
        "LayerDrop, 0.2": ["layer_drop.rate=0.2", "layer_drop.rates=even", "layer_drop.ramp=null"],
        "random-LTD, 0.5": ["token_drop.keep=0.5"],
        "tokens dropped throughout, 0.5": ["token_drop.keep=0.5", "token_drop.until=null"],
    },
    "growing": {
        "block expansion, every 4": ["adapter={method: block-expansion}", "train.learning_rate=1e-3"],
        "all weights": ["adapter={method: full}", "train.learning_rate=5e-4"],
        "all weights, stacked from half at 0.3": [
            *("adapter={method: full}", "train.learning_rate=5e-4"),
            "grow.at=[0.3]",
        ],
    },
    "sparse": {
        "tenth of the gradient": ["optimizer.gradient_share=0.1"],
        "FISH mask, 1 %": ["adapter={method: sparse}", "train.learning_rate=3e-3"],
    },
    "regularise": {
        "NEFTune, 5": ["regularise.neftune=5"],
        "stochastic depth, 0.1": ["regularise.stochastic_depth=0.1"],
        "label smoothing, 0.1": ["regularise.label_smoothing=0.1"],
        "z-loss, 1e-4": ["regularise.z_loss=1e-4"],
        "adapter dropout, 0.1": ["adapter.dropout=0.1"],
        "weight decay, 0.1": ["train.weight_decay=0.1"],
        "mixout, 0.5": ["regularise.mixout=0.5"],
        "R-Drop, 1": ["regularise.r_drop=1", "adapter.dropout=0.1"],
    },
    "optimizer": {
        "SAM, 0.05": ["optimizer.sam=0.05"],
        "ASAM, 0.5": ["optimizer.sam=0.5", "optimizer.sam_adaptive=true"],
        "LookSAM, 0.05 every 5 steps": ["optimizer.sam=0.05", "optimizer.sam_every=5", "optimizer.sam_reuse=0.7"],
        "Muon": ["optimizer.name=muon"],
        "SOAP": ["optimizer.name=soap"],
    },
    "average": {
        "EMA": ["average.method=ema", "evaluate.every=0.5"],
        "RNA of 5 samples": ["average.method=rna", "average.k=5", "evaluate.every=0.5"],
    },
    "schedule": {
        "cosine, 3 restarts": ["schedule.name=cosine", "schedule.cycles=3"],
        "polynomial": ["schedule.name=polynomial"],
    },
}
"""Techniques by section, and what switches each on."""


def main() -> None:
    arguments = _arguments()
    tasks = {name: task for name, task in TASKS.items() if arguments.task in (None, name)}
    _write_rows(arguments.out)
    wanted = {
        (name, arm, seed): Wanted(read_yaml(recipes.find(task.recipe)), words)
        for seed in range(arguments.seeds)
        for name, task in tasks.items()
        for arm, words in _runs(task, arguments, seed)
    }
    found = standing.finish_here({_folder(*key): run for key, run in wanted.items()}, arguments.out)
    runs = {key: found[_folder(*key)] for key in wanted}

    def arm(name: str, score: str, arm: str) -> Arm:
        own = [runs[name, arm, seed] for seed in range(arguments.seeds)]
        factor = TASKS[name].scores[score]
        scores = [factor * standing.scores(run)["after"][score] for run in own]
        return Arm(scores, [standing.cpu_s(run) for run in own])

    measured = {
        (name, score): Measured(
            Control({length: arm(name, score, _control(length)) for length in LENGTHS}),
            {each: arm(name, score, each) for each in _wanted(arguments) if (name, each, 0) in wanted},
            task.scores[score],
        )
        for name, task in tasks.items()
        for score in task.scores
    }
    print(standing.markdown(list(_lines(tasks, measured, list(_wanted(arguments))))))
    machine = measuring.machine("cpu", ("torch", "transformers", "peft"))
    told = {
        f"{name}, {score}": {"lengths": each.control.lengths, **each.arms} for (name, score), each in measured.items()
    }
    measuring.write_report(arguments, machine=machine, tasks=told)


@dataclass(frozen=True)
class Measured:
    """Everything that ran on one task, by one score, more of which is better."""

    control: Control
    arms: Mapping[str, Arm]
    factor: float

    @property
    def digits(self) -> int:
        """Digits of a gain behind the point."""
        return 3 if self.factor < 0 else 1

    def gain(self, arm: Arm, over: Sequence[float] | equal_compute.Floats | None) -> equal_compute.Floats | None:
        """Paired differences by seed; None where there is nothing to compare with."""
        return None if over is None else np.asarray(arm.scores) - np.asarray(over)

    def gains(self, arm: Arm) -> tuple[equal_compute.Floats | None, equal_compute.Floats | None]:
        """At equal steps, and at equal time."""
        return self.gain(arm, self.control.lengths[1].scores), self.gain(arm, self._best_within(self.control.cost(arm)))

    def _best_within(self, cost: float) -> equal_compute.Floats | None:
        """Scores of the best control that costs no more, for who has more time may stop earlier; None beyond all."""
        cost = 1.0 if abs(cost - 1) < NOISE else max(cost, min(LENGTHS))
        if (there := self.control.scores_at(cost)) is None:
            return None
        shorter = [np.asarray(self.control.lengths[length].scores) for length in LENGTHS if length <= cost]
        return max([there, *shorter], key=lambda scores: float(scores.mean()))


def _lines(
    tasks: Mapping[str, Task], measured: Mapping[tuple[str, str], Measured], arms: Sequence[str]
) -> Iterator[list[object]]:
    """The table: for each task the cost, and for each of its scores the gains."""
    head: list[object] = ["technique"]
    for name, task in tasks.items():
        head.append(f"{name}: cost")
        head += [f"{name}, {score}, {at}" for score in task.scores for at in ("equal steps", "equal time")]
    yield [*head, "pays"]
    for arm in arms:
        line: list[object] = [arm]
        for name, task in tasks.items():
            own = [measured[name, score] for score in task.scores]
            line.append(f"{own[0].control.cost(own[0].arms[arm]):.2f}" if arm in own[0].arms else "")
            line += [told for each in own for told in _told(each, arm)]
        yield [*line, _verdict([each for each in measured.values() if arm in each.arms], arm)]


def _told(measured: Measured, arm: str) -> Iterator[str]:
    if arm not in measured.arms:
        yield from ("", "")
        return
    for gain in measured.gains(measured.arms[arm]):
        yield "beyond" if gain is None else standing.interval(gain, digits=measured.digits)


def _verdict(measured: Sequence[Measured], arm: str) -> str:
    """Whether a technique is better at equal time: where an interval leaves zero out."""
    gains = [gain for each in measured if (gain := each.gains(each.arms[arm])[1]) is not None]
    ends = [standing.ends(gain) for gain in gains if len(gain) > 1]
    better, worse = (any(low > 0 for low, _ in ends), any(high < 0 for _, high in ends))
    return {(True, False): "yes", (False, True): "no, worse", (True, True): "on one"}.get((better, worse), "not shown")


def _runs(task: Task, arguments: argparse.Namespace, seed: int) -> Iterator[tuple[str, list[str]]]:
    """The control at its lengths and each technique that the task has, with the overrides of their runs."""
    place = partial(str.format, out=arguments.out.resolve(), encoder=arguments.encoder)
    base = [*SHARED, *map(place, task.words), f"seed={seed}"]
    for length in LENGTHS:
        yield _control(length), [*base, f"train.steps={round(length * STEPS)}"]
    for arm, words in _wanted(arguments).items():
        own = [_own(task, word) for word in words]
        if all(own) and arm not in task.refused:
            yield arm, [*base, *own]


def _own(task: Task, word: str) -> str:
    """An override by the name that the recipe has for it; empty where it has none."""
    key, _, value = word.partition("=")
    name = task.own.get(key, key)
    return f"{name}={value}" if name else ""


def _wanted(arguments: argparse.Namespace) -> dict[str, list[str]]:
    sections, parts = [arguments.only] if arguments.only else list(ARMS), arguments.arms or [""]
    named = {arm: words for section in sections for arm, words in ARMS[section].items()}
    return {arm: words for arm, words in named.items() if any(part in arm for part in parts)}


def _write_rows(out: Path) -> None:
    """The shortest of the shipped questions, the same each time."""
    length: Callable[[str], int] = len
    for name, count in (("train", TRAIN_ROWS), ("held_out", HELD_OUT_ROWS)):
        source = starter.FOLDER / f"fairytaleqa_{name}.jsonl"
        lines = sorted(source.read_text(encoding="utf-8").splitlines(), key=length)
        standing.write_rows([json.loads(line) for line in lines[:count]], out / f"{name}.jsonl")


def _control(length: float) -> str:
    return f"nothing, {length:g} times the steps"


def _folder(task: str, arm: str, seed: int) -> str:
    return f"seed-{seed}/{task}-{arm.replace(', ', '-').replace(' ', '_')}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", help="folder of a small encoder, such as all-MiniLM-L6-v2, for the intents")
    parser.add_argument("--only", choices=list(ARMS), help="techniques of one section")
    parser.add_argument("--arms", action="append", help="part of the names of techniques to run; all without it")
    parser.add_argument("--task", choices=list(TASKS), help="one of the tasks; both without it")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/efficient"))
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    arguments = parser.parse_args()
    if arguments.encoder is None and arguments.task != "questions":
        parser.error("task intents needs --encoder FOLDER; --task questions needs none")
    return arguments


if __name__ == "__main__":
    main()
