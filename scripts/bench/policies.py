"""Gain of each freezing policy and each average of weights on one task, over seeds, as Markdown and JSON.

    python scripts/bench/policies.py sft/quickstart --time 120s --out runs/policies --json policies.json
    python scripts/bench/policies.py classify/quickstart --steps 60 --out runs/steps --set model.id=FOLDER
    python scripts/bench/policies.py sft/full --time 5m --out runs/full --set evaluate.answers=200 \\
        --policies none static:layers=0.25 autofreeze:every=10,most=0.5 --averages ema:decay=0.99 lawa

The arms are the policies without an average, and the averages without a policy; behind a colon stand settings of their
own. All have the same wall clock from start to end, or the same number of steps. Runs stand below --out, one at a time,
the seeds one after another; what is finished is not run again.

processor s      of training after its first step, evaluations included; against none by medians
frozen           share of layer-steps in which a layer did not train; the embeddings and what comes after the blocks
                 are a layer each
average's gain   held-out loss of the last step's values less that of their average, which is shipped where that is
                 above 0: what `against none` shows where noise between runs is left out
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import measuring
from measuring import Spread, Wanted

from workbench import recipes
from workbench.config import RunConfig
from workbench.config.yaml_text import read_yaml
from workbench.models import backbones
from workbench.recipes.load import load

NONE = "none"
POLICIES = (NONE, "static", "gradual", "freezeout", "autofreeze", "lisa", "egeria")
AVERAGES = ("ema", "swa", "lawa", "rna")
SCORES = {
    "sft": {"loss": "loss", "f1": "token F1", "rouge_l": "ROUGE-L"},
    "mlm": {"loss": "loss"},
    "tag": {"loss": "loss"},
    "classify": {"accuracy": "accuracy", "loss": "log-loss", "calibration_error": "calibration error"},
}
"""Scores of each recipe by their names in scores.json and in the table; arms are compared by the first."""
Measured = Mapping[str, Spread]


def main() -> None:
    arguments = _arguments()
    config = load(arguments.recipe, arguments.set)
    runs = measuring.finish(_wanted(arguments), arguments.out, jobs=1, device=arguments.device, timed=True)
    found: dict[str, dict[str, Spread]] = {}
    for arm in arguments.policies + arguments.averages:
        told = [_measured(runs[_name(arm, seed)], config) for seed in range(arguments.seeds)]
        found[arm] = {key: Spread.of([each[key] for each in told]) for key in told[0]}
    print(_table(found, config, arguments.averages))
    machine = measuring.machine(arguments.device, ("torch", "transformers", "peft"))
    measuring.write_report(arguments, machine=machine, arms=found)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="of sft, mlm, tag or classify: a shipped one's name, or a file")
    limit = parser.add_mutually_exclusive_group(required=True)
    limit.add_argument("--time", help="wall clock of each run, as budget.time: 90, 120s, 5m")
    limit.add_argument("--steps", type=int, help="optimizer steps of each run")
    parser.add_argument("--out", type=Path, required=True, help="where the runs stand")
    parser.add_argument("--policies", nargs="*", default=list(POLICIES), metavar="NAME[:KEY=VALUE,...]")
    parser.add_argument("--averages", nargs="*", default=list(AVERAGES), metavar="NAME[:KEY=VALUE,...]")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of all runs")
    parser.add_argument("--seeds", type=int, default=3, help="from 0 on")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    arguments = parser.parse_args()
    if NONE not in arguments.policies:
        arguments.policies.insert(0, NONE)  # what all others are compared with
    return arguments


def _wanted(arguments: argparse.Namespace) -> dict[str, Wanted]:
    """The runs by name, seed after seed, so that a machine that becomes slower does so for all arms."""
    recipe = read_yaml(recipes.find(arguments.recipe))
    shared = [*arguments.set, f"train.steps={arguments.steps or 'null'}"]
    if arguments.time is not None:
        shared += ["train.epochs=null", f"budget.time={arguments.time}"]
    arms = {arm: _words("freeze.policy", arm) for arm in arguments.policies}
    arms |= {arm: _words("average.method", arm) for arm in arguments.averages}
    return {
        _name(arm, seed): Wanted(recipe, [*shared, f"seed={seed}", *words])
        for seed in range(arguments.seeds)
        for arm, words in arms.items()
    }


def _words(key: str, arm: str) -> list[str]:
    """`lawa:k=3` as overrides: average.method=lawa average.k=3."""
    name, _, settings = arm.partition(":")
    section = key.partition(".")[0]
    return [f"{key}={name}", *(f"{section}.{word}" for word in settings.split(",") if word)]


def _name(arm: str, seed: int) -> str:
    return f"{arm.replace(':', '+')}/seed-{seed}"


def _measured(run: Path, config: RunConfig) -> dict[str, float]:
    """Scores of a finished run, and what it did."""
    steps = measuring.steps(run)
    processor_s = json.loads((run / measuring.PROCESSOR_TIMES).read_text(encoding="utf-8"))
    layers = backbones.hub_config(config.model).get_text_config().num_hidden_layers + 2
    scores = measuring.scores(run)["after"]
    gains = [
        step["held_out_loss"] - step["averaged_held_out_loss"] for step in steps if "averaged_held_out_loss" in step
    ]
    return {
        **{key: scores[key] for key in SCORES[config.recipe] if key in scores},
        "steps": len(steps),
        "train_s": steps[-1]["elapsed_s"],
        "processor_s": processor_s[-1] - processor_s[0],
        "peak_bytes": float(json.loads((run / "manifest.json").read_text(encoding="utf-8"))["peak_bytes"]),
        "frozen": mean(step.get("frozen_layers", 0) for step in steps) / layers,
        **({"gain": gains[-1]} if gains else {}),
    }


def _table(measured: Mapping[str, Measured], config: RunConfig, averages: Sequence[str]) -> str:
    columns = {key: said for key, said in SCORES[config.recipe].items() if key in measured[NONE]}
    first = next(iter(columns))
    head = ["policy or average", *columns.values(), f"{columns[first]}, against {NONE}"]
    rows: list[list[Any]] = [
        [*head, "steps", "training s", "processor s", f"against {NONE}", "memory, MB", "frozen", "average's gain"]
    ]
    plain = measured[NONE][first].values
    for arm, values in measured.items():
        gain = Spread.of([mine - theirs for mine, theirs in zip(values[first].values, plain, strict=True)])
        cells = [arm, *(values[key] for key in columns), "" if arm == NONE else gain]
        cells += [f"{values['steps'].mean:.0f}", f"{values['train_s'].mean:.1f}"]
        costs = [each["processor_s"].values for each in (values, measured[NONE])]
        cells += [f"{values['processor_s'].mean:.1f}", f"{measuring.ratio(*costs).of_medians - 1:+.1%}"]
        cells += [f"{values['peak_bytes'].mean / 1e6:.0f}", f"{values['frozen'].mean:.1%}"]
        rows.append([*cells, values.get("gain", "") if arm in averages else ""])
    return measuring.markdown(rows)


if __name__ == "__main__":
    main()
