"""Effect of each way to choose or draw labelled rows, with right and with wrong labels, over paired seeds.

    python scripts/bench/label_methods.py banking77/ clinc150/ --model FOLDER [--seeds 3] [--out FOLDER] [--json FILE]

The folders have Banking77's train.csv and test.csv (Casanueva et al. 2020) and CLINC150's data_full.json (Larson et al.
2019, without questions out of scope). A small encoder trains by LoRA on --rows of a set's training rows, each seed on
others; with a share of wrong labels, each is drawn evenly from the other classes. Every arm takes as many steps as the
control, and those that say so three quarters of them; accuracy is on the set's test rows. Sampling by importance and
selection look at more rows than they train, so the table also has the processor time of a step, as a multiple of the
control's. Runs stand below --out; what is finished is not run again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import measuring
import numpy as np
import pandas as pd
import standing
from standing import Wanted

CONTROL = "every row"
FEWER = "three quarters of the steps"
ARMS: dict[str, list[str]] = {
    CONTROL: [],
    "random half": ["data.select.by=random", "data.select.rows=0.5"],
    "infobatch": ["data.sampling.by=infobatch"],
    "importance": ["data.sampling.by=importance"],
    "selective": ["data.sampling.by=selective"],
    f"{CONTROL}, {FEWER}": ["train.steps={fewer}"],
    f"infobatch, {FEWER}": ["data.sampling.by=infobatch", "train.steps={fewer}"],
}
SETTINGS = {"banking77": (0.0, 0.1, 0.3), "clinc150": (0.0,)}
"""Shares of wrong labels, by set."""
SIZE = 32


def main() -> None:
    arguments = _arguments()
    steps = arguments.epochs * -(-arguments.rows // SIZE)
    report: dict[str, Any] = {}
    for data, noises in SETTINGS.items():
        for noise in noises:
            title = f"{data}, {noise:.0%} wrong labels"
            found = _table(arguments, data, noise, steps)
            report[title] = found
            print(f"\n{title}, {steps} steps of {SIZE} rows\n", flush=True)
            print(standing.markdown(list(_lines(found))), flush=True)
    measuring.write_report(arguments, machine=measuring.machine("cpu", ("torch", "transformers", "peft")), sets=report)


def _table(arguments: argparse.Namespace, data: str, noise: float, steps: int) -> dict[str, dict[str, list[float]]]:
    """Accuracy on the test rows and seconds of a step of each arm, by seed."""
    wanted = {}
    for seed in range(arguments.seeds):
        folder = arguments.out / f"{data}-{noise:g}-{seed}"
        _write(arguments, data, noise, seed, folder)
        for arm, words in ARMS.items():
            words = [*(word.format(fewer=round(0.75 * steps)) for word in words), *arguments.overrides]
            wanted[f"{folder.name}/{arm.replace(', ', '-').replace(' ', '_')}"] = Wanted(
                _recipe(arguments, folder, seed, steps), words
            )
    runs = standing.finish(wanted, arguments.out, jobs=1, device="cpu")
    found = iter(runs.values())
    table: dict[str, dict[str, list[float]]] = {arm: {"accuracy": [], "step_s": []} for arm in ARMS}
    for _ in range(arguments.seeds):
        for arm in ARMS:
            run = next(found)
            table[arm]["accuracy"].append(standing.scores(run)["test"]["accuracy"])
            table[arm]["step_s"].append(standing.step_s(run))
    return table


def _lines(table: dict[str, dict[str, list[float]]]) -> Iterator[list[object]]:
    yield ["arm", "accuracy", "points more than every row", "time of a step"]
    control = table[CONTROL]
    for arm, found in table.items():
        gains = 100 * (np.asarray(found["accuracy"]) - control["accuracy"])
        told = "" if arm == CONTROL else standing.interval(gains, digits=1)
        times = np.median(found["step_s"]) / np.median(control["step_s"])
        yield [arm, f"{100 * np.mean(found['accuracy']):.1f}", told, f"{times:.2f}"]


def _recipe(arguments: argparse.Namespace, folder: Path, seed: int, steps: int) -> dict[str, Any]:
    here = folder.resolve()
    return {
        "recipe": "classify",
        "seed": seed,
        "model": {"id": arguments.model, "weights": "auto"},
        "adapter": {"method": "lora", "rank": 16, "alpha": 32, "targets": "all-linear"},
        "data": {
            "train": str(here / "train.csv"),
            "held_out": str(here / "held_out.csv"),
            "test": str(here / "test.csv"),
            "max_tokens": 64,
            "overlap": "drop",
        },
        "batch": {"size": SIZE},
        "classes": {"sampling": "none", "every_class": False},
        "train": {"steps": steps, "learning_rate": 1.0e-3},
        "schedule": {"name": "linear", "warmup": 0.05},
        "evaluate": {"every": None, "probe": 0},
        "save": {"every": None},
    }


def _write(arguments: argparse.Namespace, data: str, noise: float, seed: int, folder: Path) -> None:
    """The rows of a seed: those that train, of which some are labelled wrongly, a few held out, and the test rows."""
    if (folder / "test.csv").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    train, test = _banking77(arguments.banking77) if data == "banking77" else _clinc150(arguments.clinc150)
    train = train.drop_duplicates("text").sample(frac=1, random_state=seed).reset_index(drop=True)
    held_out, train = train[-200:], train[: arguments.rows].reset_index(drop=True)
    names = np.asarray(sorted(train["label"].unique()))
    chance = np.random.default_rng(seed)
    wrong = chance.choice(len(train), size=round(noise * len(train)), replace=False)
    number = np.searchsorted(names, train["label"].to_numpy()[wrong])
    label = train["label"].to_numpy().copy()
    label[wrong] = names[(number + chance.integers(1, len(names), size=len(wrong))) % len(names)]
    train.assign(label=label).to_csv(folder / "train.csv", index=False)
    held_out.to_csv(folder / "held_out.csv", index=False)
    test.to_csv(folder / "test.csv", index=False)


def _banking77(folder: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    found = [pd.read_csv(folder / f"{name}.csv").set_axis(["text", "label"], axis=1) for name in ("train", "test")]
    return found[0], found[1]


def _clinc150(folder: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    parts = json.loads((folder / "data_full.json").read_text(encoding="utf-8"))
    return pd.DataFrame(parts["train"], columns=["text", "label"]), pd.DataFrame(
        parts["test"], columns=["text", "label"]
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("banking77", type=Path)
    parser.add_argument("clinc150", type=Path)
    parser.add_argument("overrides", nargs="*", help="key=value")
    parser.add_argument("--model", required=True, help="folder of a small encoder, such as all-MiniLM-L6-v2")
    parser.add_argument("--rows", type=int, default=2_000)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/label_methods"))
    parser.add_argument("--json", type=Path)
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    main()
