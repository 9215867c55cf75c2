"""Predicted seconds of a step against those of the same run's steps, prediction and steps in turn: a table.

    python scripts/bench/step_time.py --encoder FOLDER [--llama FOLDER] [--json step_time.json] [--only WORD ...]

--encoder is a sentence encoder such as all-MiniLM-L6-v2, --llama a model that random_llama.py wrote. Every
configuration has a process of its own, and every prediction is for those steps that are measured, so that the lengths
of their rows are the same. On a machine that others use too, --cpu-time counts the processor time of both sides; then
OMP_NUM_THREADS=1 keeps threads from waiting for each other.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import measuring

from workbench.planning.step_time import Timed, timed
from workbench.recipes.load import load
from workbench.recipes.verbs.plans.plan import plan
from workbench.training.bank_trainer import BankTrainer
from workbench.training.checkpoints import Progress
from workbench.training.optim.optimizer_states import read_scalars
from workbench.training.trainer import Trainer

ROUNDS = 3
"""So often some steps are measured, with a prediction before, between and after them."""
SHORT = ["train.epochs=null", "evaluate.answers=0", "evaluate.every=null", "data.limit=400"]
Clock = Callable[[], float]


def main() -> None:
    arguments = _arguments()
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    rows: list[list[object]] = [
        [
            "configuration",
            "predicted s",
            "measured s",
            "ratio",
            "of single predictions",
            "interval",
            "timed in s",
        ]
    ]
    ratios, found = [], {}
    for name, (recipe, words) in _configurations(arguments).items():
        if arguments.only and not any(word in name for word in arguments.only):
            continue
        words += [*SHORT, f"train.steps={ROUNDS * arguments.steps}"]
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as own:  # what a process did before slows it down
            predictions, steps, took = own.submit(_both, recipe, words, clock, arguments.steps).result()
        predicted = median(each.seconds for each in predictions)
        ratios.append(predicted / median(steps))
        found[name] = {"predicted": [each.seconds for each in predictions], "measured": steps, "timed": took}
        single = sorted(each.seconds / median(steps) for each in predictions)
        low, high = (median(getattr(each, end) for each in predictions) for end in ("low", "high"))
        rows.append(
            [
                name,
                f"{predicted:.3f}",
                f"{median(steps):.3f}",
                f"{ratios[-1]:.2f}",
                f"{single[0]:.2f} to {single[-1]:.2f}",
                f"{low:.3f} to {high:.3f}",
                f"{median(took):.1f}",
            ]
        )
        print(" | ".join(str(cell) for cell in rows[-1]), flush=True)
    print(measuring.markdown(rows))
    errors = [abs(ratio - 1) for ratio in ratios]
    print(f"Of {len(ratios)} configurations: median error {median(errors):.1%}, worst {max(errors):.1%}.")
    measuring.write_report(arguments, machine=measuring.machine("cpu", ("torch", "transformers", "peft")), found=found)


def _configurations(arguments: argparse.Namespace) -> dict[str, tuple[str, list[str]]]:
    """Recipe and overrides by name."""
    found: dict[str, tuple[str, list[str]]] = {}
    for method, weights in (
        ("lora", "float32"),
        ("lora", "bfloat16"),
        ("lora", "nf4"),
        ("lora", "int8"),
        ("full", "float32"),
        ("full", "bfloat16"),
        ("houlsby", "bfloat16"),
        ("prefix", "bfloat16"),
    ):
        words = [f"model.weights={weights}", f"adapter={{method: {method}}}"]
        found[f"starter, {method}, {weights}"] = ("sft/quickstart", words)
    words = ["model.weights=bfloat16", "train.checkpointing=true"]
    found["starter, lora, bfloat16, checkpointing"] = ("sft/quickstart", words)
    found["starter, lora, half frozen"] = ("sft/quickstart", ["freeze={policy: static, layers: 0.5, cache: 'off'}"])
    found["starter, classes, lora"] = ("classify/quickstart", [])
    found["starter, bank of 5 folds, lora"] = ("crossval/quickstart", [])
    found["starter, bank of 8, lora"] = ("sweep/quickstart", [])
    for method, weights in (("lora", "float32"), ("full", "float32"), ("lora", "bfloat16")):
        words = [f"model.id={arguments.encoder}", f"model.weights={weights}", f"adapter={{method: {method}}}"]
        found[f"MiniLM, classes, {method}, {weights}"] = ("classify/quickstart", words)
    for method, weights in (("lora", "bfloat16"), ("lora", "nf4")):
        words = [f"model.id={arguments.llama}", f"model.weights={weights}", f"adapter={{method: {method}}}"]
        if arguments.llama:
            found[f"random Llama, {method}, {weights}"] = ("sft/quickstart", words)
    return found


def _both(recipe: str, words: list[str], clock: Clock, count: int) -> tuple[list[Timed], list[float], list[float]]:
    """Predictions, the seconds of single steps, and the seconds that predictions took."""
    config = load(recipe, words)
    planned = plan(config)
    work, flops = planned.work, planned.dry_run.flops_per_token
    predictions: list[Timed] = []
    steps: list[float] = []
    took: list[float] = []

    def predict() -> None:
        began = clock()
        predictions.append(timed(work, flops, clock=clock))
        took.append(clock() - began)

    def measure(fit: Trainer | BankTrainer) -> None:
        members = [fit.member] if isinstance(fit, Trainer) else list(fit.members.values())
        step = _prepared(fit)
        predict()
        step()  # makes the optimizer's state
        for member in members:
            member.progress = Progress()
        for _ in range(ROUNDS):
            for _ in range(count):
                began = clock()
                step()
                steps.append(clock() - began)
            predict()

    measuring.intercepted(config, measure)
    return predictions, steps, took


def _prepared(fit: Trainer | BankTrainer) -> Callable[[], object]:
    """A training at its beginning, and its step without files."""
    fit.freezer.follow(step=0, share=0.0)
    if isinstance(fit, Trainer):
        fit.prepare()
        return lambda: fit.step(fit.member.batch())
    fit.masters.refresh()
    fit.bank.train()

    def step() -> None:
        members = list(fit.members.values())
        clipped = (member.clip(member.batch()) for member in members)  # after the gradients
        scalars = read_scalars([*fit._losses_that_fit(fit.members), *clipped])
        for member, loss, norm in zip(members, scalars[: len(members)], scalars[len(members) :], strict=True):
            member.update(loss, norm, member.batch())
        fit.masters.refresh()

    return step


def _arguments() -> argparse.Namespace:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--encoder", required=True, help="folder or hub id")
    found.add_argument("--llama", help="folder of a larger causal model")
    found.add_argument("--only", nargs="*", default=[], help="configurations with one of these words in their name")
    found.add_argument("--steps", type=int, default=4, help=f"measured steps in each of {ROUNDS} rounds")
    found.add_argument("--cpu-time", action="store_true", help="processor time instead of wall clock")
    found.add_argument("--json", type=Path, help="a file to write")
    return found.parse_args()


if __name__ == "__main__":
    main()
