"""Effect of each technique of training on two backbones and two tasks, at equal steps and at equal time, paired seeds.

    python scripts/bench/efficient.py --encoder FOLDER [--only regularise] [--seeds 3] [--out FOLDER] [--json FILE]

The tasks are shipped ones made short: sft/quickstart on its shortest questions, some passes over few of them, so that
the starter (6 M parameters) begins to learn rows by heart; and classify/quickstart with the encoder, on few rows of its
20 intents. Each arm is its control and one technique more, in as many steps. The control is LoRA with AdamW, or, where
a technique is for all weights, these with AdamW. Processor time beside the control's is what the technique costs, with
the dense training that some begin with: at equal time it is compared with the best control that takes no longer,
between its lengths by the logarithm. Gains are positive where the technique is better, with 95 % intervals over paired
seeds. Runs stand below --out, in this process one after another, seed by seed; what is finished is not run again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import measuring
import numpy as np
from measuring import Arm, Control, Wanted

from workbench import recipes
from workbench.config.yaml_text import read_yaml
from workbench.data import starter

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


@dataclass(frozen=True)
class Base:
    """A training that techniques are added to, and that they are compared with at several lengths."""

    name: str
    words: tuple[str, ...]
    lengths: tuple[float, ...]
    """Steps of its runs, as multiples of an arm's."""

    def control(self, length: float) -> str:
        """Name of its run of so many times the steps."""
        return f"{self.name}, {length:g} times the steps"


LORA = Base("nothing", (), (0.5, 1.0, 2.5))
WHOLE = Base("all weights", ("adapter={method: full}", "train.learning_rate=5e-4"), (0.5, 1.0))
DENSE = "{dense}"
"""Place of the run of all weights in the same task with the same seed."""
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
        # BERT normalises what its blocks have added, and Sophia draws tokens.
        ("block expansion, every 4, 1e-3", "Sophia, 1e-3"),
    ),
}
TRAIN_ROWS, HELD_OUT_ROWS = 64, 48
"""The shortest of the questions."""
ARMS: dict[str, dict[str, list[str]]] = {
    "freeze": {
        "half of the blocks frozen": ["freeze.policy=static"],
        "autofreeze": ["freeze.policy=autofreeze", "freeze.every=5"],
        "egeria": ["freeze.policy=egeria", "freeze.every=5"],
    },
    "thinning": {
        "progressive layer dropping, 0.5": ["layer_drop.rate=0.5"],
        "LayerDrop, 0.2": ["layer_drop.rate=0.2", "layer_drop.rates=even", "layer_drop.ramp=null"],
        "random-LTD, 0.5": ["token_drop.keep=0.5"],
        "tokens dropped throughout, 0.5": ["token_drop.keep=0.5", "token_drop.until=null"],
    },
    "growing": {
        "block expansion, every 4, 1e-3": ["adapter={method: block-expansion}", "train.learning_rate=1e-3"],
    },
    "sparse": {
        "tenth of the gradient": ["optimizer.gradient_share=0.1"],
        "FISH mask, 1 %, 3e-3": ["adapter={method: sparse}", "train.learning_rate=3e-3"],
        "mask of largest gradients, 1 %, 3e-3": ["adapter={method: sparse, by: gradient}", "train.learning_rate=3e-3"],
        "mask of largest weights, 1 %, 3e-3": ["adapter={method: sparse, by: magnitude}", "train.learning_rate=3e-3"],
        "LT-SFT mask, 1 %, 3e-3": [
            "adapter={method: sparse, by: movement, trained: {dense}}",
            "train.learning_rate=3e-3",
        ],
        "SHiRA": ["adapter={method: shira}"],
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
        "Shampoo": ["optimizer.name=shampoo"],
        "Sophia, 1e-3": ["optimizer.name=sophia", "train.learning_rate=1e-3"],
    },
    "average": {
        "SWA": ["average.method=swa", "evaluate.every=0.5"],
        "EMA": ["average.method=ema", "evaluate.every=0.5"],
        "RNA of 5 samples": ["average.method=rna", "average.k=5", "evaluate.every=0.5"],
    },
    "schedule": {
        "cosine, 3 restarts": ["schedule.name=cosine", "schedule.cycles=3"],
        "polynomial": ["schedule.name=polynomial"],
        "reduced on plateau": ["schedule.name=plateau", "schedule.patience=1", "evaluate.every=0.1"],
        "batch grows to 32 by noise scale": ["batch.growth=32", "optimizer.noise_scale=5"],
    },
    "start": {
        "LoRA-GA, 5e-4": ["adapter.method=lora-ga", "train.learning_rate=5e-4"],
        "PiSSA": ["adapter.method=pissa"],
        "EVA": ["adapter.method=eva"],
        "CorDA": ["adapter.method=corda"],
        "OLoRA": ["adapter.method=olora"],
    },
    "whole": {
        "stacked from half at 0.3": ["grow.at=[0.3]"],
        "L2-SP, 0.01": ["optimizer.l2_start=0.01"],
        "GaLore, 2e-3": ["optimizer.name=galore", "train.learning_rate=2e-3"],
        "AdamW, 2e-3": ["train.learning_rate=2e-3"],
        "APOLLO": ["optimizer.name=apollo"],
        "APOLLO-Mini": ["optimizer.name=apollo_mini"],
        "Adam-mini": ["optimizer.name=adam_mini"],
        "BAdam, every 3": ["freeze={policy: badam, every: 3}"],
        "half of the weights zero": ["adapter.sparsity=0.5"],
        "half zero, dense teacher": [
            *("recipe=distill", "of={recipe}", "distill.teacher.id={dense}"),
            "adapter.sparsity=0.5",
        ],
    },
}
"""Techniques by section, and what switches each on; a learning rate that is not the control's stands in the name."""
BASES = {section: WHOLE if section == "whole" else LORA for section in ARMS}
"""The control of each section."""


def main() -> None:
    arguments = _arguments()
    tasks = {name: task for name, task in TASKS.items() if arguments.task in (None, name)}
    _write_rows(arguments.out)
    wanted = {
        (name, arm, seed): Wanted(read_yaml(recipes.find(TASKS[name].recipe)), words)
        for seed in range(arguments.seeds)
        for name in tasks
        for arm, words in _runs(name, arguments, seed)
    }
    found = measuring.finish_here({_folder(*key): run for key, run in wanted.items()}, arguments.out)
    runs = {key: found[_folder(*key)] for key in wanted}

    def arm(name: str, score: str, arm: str) -> Arm:
        own = [runs[name, arm, seed] for seed in range(arguments.seeds)]
        factor = TASKS[name].scores[score]
        scores = [factor * measuring.scores(run)["after"][score] for run in own]
        return Arm(scores, [measuring.cpu_s(run) for run in own])

    def of(base: Base, name: str, score: str) -> Measured:
        control = Control({length: arm(name, score, base.control(length)) for length in base.lengths})
        arms = {each: arm(name, score, each) for each in _techniques(arguments, base) if (name, each, 0) in wanted}
        for each in filter(_begins_dense, arms):
            dense = arm(name, score, WHOLE.control(1)).cpu_s
            more = [own_s + dense_s - control.fixed_s for own_s, dense_s in zip(arms[each].cpu_s, dense, strict=True)]
            arms[each] = Arm(arms[each].scores, more)
        return Measured(control, arms, TASKS[name].scores[score])

    measured = {
        (base.name, name, score): of(base, name, score)
        for base in _bases(arguments)
        for name, task in tasks.items()
        for score in task.scores
    }
    lines = [
        line for base in _bases(arguments) for line in _lines(base, tasks, measured, list(_techniques(arguments, base)))
    ]
    print(measuring.markdown([_head(tasks), *lines]))
    machine = measuring.machine("cpu", ("torch", "transformers", "peft"))
    told = {", ".join(key): {"lengths": each.control.lengths, **each.arms} for key, each in measured.items()}
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

    def gain(self, arm: Arm, over: Sequence[float] | measuring.Floats | None) -> measuring.Floats | None:
        """Paired differences by seed; None where there is nothing to compare with."""
        return None if over is None else np.asarray(arm.scores) - np.asarray(over)

    def gains(self, arm: Arm) -> tuple[measuring.Floats | None, measuring.Floats | None]:
        """At equal steps, and at equal time."""
        return self.gain(arm, self.control.lengths[1].scores), self.gain(arm, self._best_within(self.control.cost(arm)))

    def _best_within(self, cost: float) -> measuring.Floats | None:
        """Scores of the best control that costs no more, for who has more time may stop earlier; None beyond all."""
        cost = 1.0 if abs(cost - 1) < NOISE else max(cost, min(self.control.lengths))
        if (there := self.control.scores_at(cost)) is None:
            return None
        shorter = [np.asarray(self.control.lengths[length].scores) for length in self.control.lengths if length <= cost]
        return max([there, *shorter], key=lambda scores: float(scores.mean()))


def _head(tasks: Mapping[str, Task]) -> list[object]:
    head: list[object] = ["technique"]
    for name, task in tasks.items():
        head.append(f"{name}: cost")
        head += [f"{name}, {score}, {at}" for score in task.scores for at in ("equal steps", "equal time")]
    return [*head, "pays"]


def _lines(
    base: Base, tasks: Mapping[str, Task], measured: Mapping[tuple[str, str, str], Measured], arms: Sequence[str]
) -> Iterator[list[object]]:
    """Rows of the techniques on a base: for each task the cost, and for each of its scores the gains."""
    prefix = "" if base is LORA else f"{base.name}: "
    for arm in arms:
        line: list[object] = [f"{prefix}{arm}"]
        for name, task in tasks.items():
            own = [measured[base.name, name, score] for score in task.scores]
            line.append(f"{own[0].control.cost(own[0].arms[arm]):.2f}" if arm in own[0].arms else "")
            line += [told for each in own for told in _told(each, arm)]
        yield [*line, _verdict([each for each in measured.values() if arm in each.arms], arm)]


def _told(measured: Measured, arm: str) -> Iterator[str]:
    if arm not in measured.arms:
        yield from ("", "")
        return
    for gain in measured.gains(measured.arms[arm]):
        yield "beyond" if gain is None else measuring.interval(gain, digits=measured.digits)


def _verdict(measured: Sequence[Measured], arm: str) -> str:
    """Whether a technique is better at equal time: where an interval leaves zero out."""
    gains = [gain for each in measured if (gain := each.gains(each.arms[arm])[1]) is not None]
    ends = [measuring.ends(gain) for gain in gains if len(gain) > 1]
    better, worse = (any(low > 0 for low, _ in ends), any(high < 0 for _, high in ends))
    return {(True, False): "yes", (False, True): "no, worse", (True, True): "on one"}.get((better, worse), "not shown")


def _runs(task: str, arguments: argparse.Namespace, seed: int) -> Iterator[tuple[str, list[str]]]:
    """The controls at their lengths and each technique that the task has, with the overrides of their runs."""
    out, own = arguments.out.resolve(), TASKS[task]
    places = {
        "{out}": str(out),
        "{encoder}": str(arguments.encoder),
        "{recipe}": own.recipe.partition("/")[0],
        DENSE: str(out / _folder(task, WHOLE.control(1), seed)),
    }
    shared = [*SHARED, *own.words, f"seed={seed}"]
    dense = any(map(_begins_dense, _techniques(arguments)))
    found = {
        base.control(length): [*shared, *base.words, f"train.steps={round(length * STEPS)}"]
        for base in (LORA, WHOLE)
        for length in base.lengths
        if base in _bases(arguments) or (dense and base is WHOLE and length == 1)
    }
    for base in _bases(arguments):
        for arm, words in _techniques(arguments, base).items():
            named = [_own(own, word) for word in words]
            if all(named) and arm not in own.refused:
                found[arm] = [*shared, *base.words, *named]
    for arm, words in found.items():
        yield arm, [_placed(word, places) for word in words]


def _begins_dense(arm: str) -> bool:
    """Whether a technique needs a training of all weights before."""
    return any(DENSE in word for section in ARMS.values() for word in section.get(arm, ()))


def _placed(word: str, places: Mapping[str, str]) -> str:
    for place, value in places.items():
        word = word.replace(place, value)
    return word


def _own(task: Task, word: str) -> str:
    """An override by the name that the recipe has for it; empty where it has none."""
    key, _, value = word.partition("=")
    name = task.own.get(key, key)
    return f"{name}={value}" if name else ""


def _techniques(arguments: argparse.Namespace, base: Base | None = None) -> dict[str, list[str]]:
    """The techniques that are asked for, on one base or on each."""
    sections = [each for each in ARMS if arguments.only in (None, each) and base in (None, BASES[each])]
    named = {arm: words for section in sections for arm, words in ARMS[section].items()}
    return {arm: words for arm, words in named.items() if any(part in arm for part in arguments.arms or [""])}


def _bases(arguments: argparse.Namespace) -> list[Base]:
    """The controls that are needed."""
    return [base for base in (LORA, WHOLE) if _techniques(arguments, base)]


def _write_rows(out: Path) -> None:
    """The shortest of the shipped questions, the same each time."""
    length: Callable[[str], int] = len
    for name, count in (("train", TRAIN_ROWS), ("held_out", HELD_OUT_ROWS)):
        source = starter.FOLDER / f"fairytaleqa_{name}.jsonl"
        lines = sorted(source.read_text(encoding="utf-8").splitlines(), key=length)
        measuring.write_rows([json.loads(line) for line in lines[:count]], out / f"{name}.jsonl")


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
