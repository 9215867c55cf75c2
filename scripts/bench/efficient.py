"""Effect of each technique of training, on two backbones and two tasks, at equal steps, over paired seeds.

    python scripts/bench/efficient.py --encoder FOLDER [--only regularise] [--seeds 3] [--out FOLDER] [--json FILE]

The tasks are the shipped ones: sft/quickstart on 400 of its questions, four times over, where the starter (6 M
parameters) begins to learn rows by heart; and classify/quickstart on 600 rows, twelve times over, with the encoder. The
score is the held-out loss in nats a token, or the held-out accuracy in points. The time of a step is a multiple of the
control's, by medians over runs. Runs stand below --out, seeds one after another; what is finished is not run again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import measuring
import numpy as np
import standing
from standing import Wanted

from workbench import recipes
from workbench.schema import read_yaml

CONTROL = "nothing"
SHARED = ["evaluate.every=null", "save.every=null"]


@dataclass(frozen=True)
class Task:
    """A shipped recipe and how its runs are scored."""

    recipe: str
    words: tuple[str, ...]
    score: str
    """In scores.json after training."""
    factor: float
    """So that more of it is better, in the unit of the table."""
    own: Mapping[str, str]
    """Settings that have another name in this recipe; of those with an empty one there are none."""


TASKS = {
    "questions, starter": Task(
        "sft/quickstart", ("data.limit=400", "train.epochs=4", "evaluate.answers=0"), "loss", -1.0, {}
    ),
    "intents, encoder": Task(
        "classify/quickstart",
        ("data.limit=600", "train.epochs=12", "evaluate.probe=0"),
        "accuracy",
        100.0,
        {"regularise.label_smoothing": "classes.smoothing", "regularise.z_loss": ""},
    ),
}
ARMS: dict[str, dict[str, list[str]]] = {
    "regularise": {
        "NEFTune, 5": ["regularise.neftune=5"],
        "stochastic depth, 0.1": ["regularise.stochastic_depth=0.1"],
        "label smoothing, 0.1": ["regularise.label_smoothing=0.1"],
        "z-loss, 1e-4": ["regularise.z_loss=1e-4"],
        "adapter dropout, 0.1": ["adapter.dropout=0.1"],
        "weight decay, 0.1": ["train.weight_decay=0.1"],
        "SAM, 0.05": ["optimizer.sam=0.05"],
        "LookSAM, 0.05 every 5 steps": ["optimizer.sam=0.05", "optimizer.sam_every=5", "optimizer.sam_reuse=0.7"],
        "mixout, 0.5": ["regularise.mixout=0.5"],
        "R-Drop, 1": ["regularise.r_drop=1", "adapter.dropout=0.1"],
    },
    "average": {
        "RNA of 5 samples": ["average.method=rna", "evaluate.every=0.25"],
    },
    "batch": {
        "growing, up to 8 times": ["batch.growth=128", "optimizer.noise_scale=5", "train.steps=100"],
    },
    "sparse": {
        "tenth of the gradient": ["optimizer.gradient_share=0.1"],
        "FISH mask, 1 %": ["adapter.method=sparse", "train.learning_rate=3e-3"],
        "largest weights, 1 %": ["adapter.method=sparse", "adapter.by=magnitude", "train.learning_rate=3e-3"],
    },
    "thinning": {
        "progressive layer dropping, 0.5": ["layer_drop.rate=0.5"],
        "random-LTD, 0.5": ["token_drop.keep=0.5"],
        "tokens dropped throughout, 0.5": ["token_drop.keep=0.5", "token_drop.until=null"],
        "LayerDrop, 0.2": ["layer_drop.rate=0.2", "layer_drop.rates=even", "layer_drop.ramp=null"],
    },
    "growing": {
        "block expansion, every 4": ["adapter.method=block-expansion", "train.learning_rate=1e-3"],
    },
    "schedule": {
        "plateau": ["schedule.name=plateau", "evaluate.every=0.1"],
    },
}
"""Techniques by section, and what switches each on."""


def main() -> None:
    arguments = _arguments()
    recipe = {name: read_yaml(recipes.find(task.recipe)) for name, task in TASKS.items()}
    wanted = {
        f"{name.split(',')[0]}/{arm.replace(', ', '-').replace(' ', '_')}/seed-{seed}": (
            name,
            arm,
            Wanted(recipe[name], words),
        )
        for seed in range(arguments.seeds)
        for name, task in TASKS.items()
        for arm, words in _arms(task, arguments, seed)
    }
    runs = standing.finish({key: run for key, (_, _, run) in wanted.items()}, arguments.out, jobs=1, device="cpu")
    found: dict[str, dict[str, list[tuple[float, float]]]] = {name: {} for name in TASKS}
    for key, (name, arm, _) in wanted.items():
        task = TASKS[name]
        score = task.factor * standing.scores(runs[key])["after"][task.score]
        found[name].setdefault(arm, []).append((score, _step_s(runs[key])))
    for name, arms in found.items():
        print(f"\n{name}\n\n{standing.markdown(list(_lines(TASKS[name], arms)))}", flush=True)
    measuring.write_report(arguments, machine=measuring.machine("cpu", ("torch", "transformers", "peft")), tasks=found)


def _step_s(run: Path) -> float:
    """Mean seconds of a step after the first, for some techniques act in some steps only; without evaluations."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    spent = np.diff([record["elapsed_s"] for record in records])
    return float(np.mean(spent[[record.get("held_out_loss") is None for record in records[1:]]]))


def _arms(task: Task, arguments: argparse.Namespace, seed: int) -> Iterator[tuple[str, list[str]]]:
    """Each technique that the task has, and the overrides of its run."""
    model = [f"model.id={arguments.encoder}"] if task.score == "accuracy" else []
    base = [*SHARED, *task.words, *model, f"seed={seed}"]
    yield CONTROL, base
    for section in [arguments.only] if arguments.only else ARMS:
        for arm, words in ARMS[section].items():
            own = [_own(task, word) for word in words]
            if all(own):
                yield arm, [*base, *own]


def _own(task: Task, word: str) -> str:
    """An override by the name that the recipe has for it; empty where it has none."""
    key, _, value = word.partition("=")
    name = task.own.get(key, key)
    return f"{name}={value}" if name else ""


def _lines(task: Task, arms: Mapping[str, Sequence[tuple[float, float]]]) -> Iterator[list[object]]:
    yield ["technique", f"{task.score}", "better than nothing by", "time of a step"]
    control = np.asarray(arms[CONTROL])
    for arm, values in arms.items():
        table = np.asarray(values)
        digits = 3 if task.factor < 0 else 1
        gain = "" if arm == CONTROL else standing.interval(table[:, 0] - control[:, 0], digits=digits)
        score = f"{abs(table[:, 0].mean()):.3f}" if task.factor < 0 else f"{table[:, 0].mean():.1f}"
        yield [arm, score, gain, f"{np.median(table[:, 1]) / np.median(control[:, 1]):.2f}"]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", required=True, help="folder of a small encoder, such as all-MiniLM-L6-v2")
    parser.add_argument("--only", choices=list(ARMS), help="techniques of one section")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/efficient"))
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
