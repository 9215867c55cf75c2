"""Effect of each way to choose, draw or order labelled rows, with right and with wrong labels, over paired seeds.

    python scripts/bench/label_methods.py banking77/ clinc150/ --model FOLDER [--seeds 3] [--out FOLDER] [key=value]

The folders have Banking77's train.csv and test.csv (Casanueva et al. 2020) and CLINC150's data_full.json (Larson et al.
2019, without questions out of scope). A small encoder trains by LoRA on --rows training rows of --classes of a set's
intents, each seed on others; with a share of wrong labels, each is drawn evenly from the other classes. 100 other rows,
rightly labelled, are the target of by=importance, which reads no labels, and of by=gradient. Cleaned rows are those
that three folds, trained for as many steps in one bank, do not suspect (suspects.parquet); the folds count in the cost.
Every arm takes as many steps as the control; at equal compute it is compared with a control that trains for as long.
Accuracy is on test rows, whose labels are right. Runs stand below --out, in this process one after another; what is
finished is not run again.
--arms runs some of the arms alone, by a part of their names. `label_noise.py` has data.drop_suspects on more rows.
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
from measuring import Arm, Control, Wanted

LENGTHS = {"banking77": (0.5, 1.0, 2.0, 9.0), "clinc150": (0.5, 1.0, 2.0, 11.0)}
"""Steps of the runs of the control, as multiples of its own, by set: the longest costs what by=gradient does."""
CHOICE = "random half"
SIMILAR, ALIGNED = "by importance (DSIR), half", "by gradient (LESS), half"
CLEANED, FOLDS = "cleaned, without the suspects of folds", "folds of every row"
CLEAN_ROWS = "clean.csv"
ARMS: dict[str, list[str]] = {
    CHOICE: ["data.select.by=random", "data.select.rows=0.5"],
    SIMILAR: ["data.select.by=importance", "data.select.rows=0.5", "data.select.target={folder}/target.csv"],
    ALIGNED: [
        "data.select.by=gradient",
        "data.select.rows=0.5",
        "data.select.target={folder}/target.csv",
        "data.select.warm_up=0.25",
    ],
    "InfoBatch": ["data.sampling.by=infobatch"],
    "importance sampling": ["data.sampling.by=importance"],
    "selective (biased)": ["data.sampling.by=selective"],
    CLEANED: [f"data.train={{folder}}/{CLEAN_ROWS}"],
    "short rows first": ["data.curriculum.by=length"],
    "easy rows first, by probes": ["data.curriculum.by=loss"],
}
SETTINGS = {"banking77": (0.1, 0.3), "clinc150": (0.0,)}
"""Shares of wrong labels, by set."""


def main() -> None:
    arguments = _arguments()
    report: dict[str, Any] = {}
    settings = [(data, noise) for data, noises in SETTINGS.items() for noise in noises if data in arguments.sets]
    for seed in range(arguments.seeds):  # all settings have their first seed before one has its last
        for data, noise in settings:
            if CLEANED in _wanted_arms(arguments):
                _clean(arguments, data, noise, seed)
            measuring.finish_here(dict(_runs(arguments, data, noise, seed)), arguments.out)
    for data, noise in settings:
        title = f"{data}, {noise:.0%} wrong labels"
        control, arms = _found(arguments, data, noise)
        report[title] = {"control": control.lengths, "arms": arms}
        rows = measuring.gains_table(
            control,
            arms,
            references={name: CHOICE for name in (SIMILAR, ALIGNED) if {name, CHOICE} <= set(arms)},
            score="accuracy",
            sign=1,
            digits=1,
        )
        print(f"\n{title}, {arguments.steps} steps of {arguments.batch} rows\n")
        print(measuring.markdown(rows), flush=True)
    measuring.write_report(arguments, machine=measuring.machine("cpu", ("torch", "transformers", "peft")), sets=report)


def _found(arguments: argparse.Namespace, data: str, noise: float) -> tuple[Control, dict[str, Arm]]:
    """Accuracy in percent and processor time of each arm; all runs are finished."""

    def arm(name: str) -> Arm:
        own = [arguments.out / _name(data, noise, seed, name) for seed in range(arguments.seeds)]
        cost = np.asarray([measuring.cpu_s(run) for run in own])
        if name == CLEANED:
            cost += [measuring.cpu_s(run.with_name(_word(FOLDS))) for run in own]
        return Arm([100 * measuring.scores(run)["test"]["accuracy"] for run in own], cost.tolist())

    control = Control({length: arm(f"every row {length:g}") for length in LENGTHS[data]})
    return control, {name: arm(name) for name in _wanted_arms(arguments)}


def _wanted_arms(arguments: argparse.Namespace) -> dict[str, list[str]]:
    return {name: own for name, own in ARMS.items() if any(part in name for part in arguments.arms or [""])}


def _runs(arguments: argparse.Namespace, data: str, noise: float, seed: int) -> Iterator[tuple[str, Wanted]]:
    """The runs of a seed with their names."""
    folder = (arguments.out / _folder(data, noise, seed)).resolve()
    _write(arguments, data, noise, seed, folder)
    recipe = _recipe(arguments, folder, seed)
    for length in LENGTHS[data]:
        words = [f"train.steps={round(length * arguments.steps)}", *arguments.overrides]
        yield _name(data, noise, seed, f"every row {length:g}"), Wanted(recipe, words)
    for name, own in _wanted_arms(arguments).items():
        words = [f"train.steps={arguments.steps}", *arguments.overrides, *(word.format(folder=folder) for word in own)]
        yield _name(data, noise, seed, name), Wanted(recipe, words)


def _clean(arguments: argparse.Namespace, data: str, noise: float, seed: int) -> None:
    """Write the rows of a seed that folds do not suspect of a wrong label."""
    folder = (arguments.out / _folder(data, noise, seed)).resolve()
    _write(arguments, data, noise, seed, folder)
    plain = _recipe(arguments, folder, seed)
    del plain["data"]["held_out"], plain["evaluate"]["probe"]
    recipe = {**plain, "recipe": "crossval", "folds": {"k": 3}}
    name = _name(data, noise, seed, FOLDS)
    wanted = {name: Wanted(recipe, [f"train.steps={arguments.steps}", *arguments.overrides])}
    suspects = pd.read_parquet(measuring.finish_here(wanted, arguments.out)[name] / "suspects.parquet")
    rows = pd.read_csv(folder / "train.csv")
    rows[~rows["text"].isin(suspects.get("text", []))].to_csv(folder / CLEAN_ROWS, index=False)


def _recipe(arguments: argparse.Namespace, folder: Path, seed: int) -> dict[str, Any]:
    return {
        "recipe": "classify",
        "seed": seed,
        "model": {"id": arguments.model, "weights": "auto"},
        "adapter": {"method": "lora", "rank": 16, "alpha": 32, "targets": "all-linear"},
        "data": {
            "train": str(folder / "train.csv"),
            "held_out": str(folder / "held_out.csv"),
            "test": str(folder / "test.csv"),
            "max_tokens": 64,
            "overlap": "drop",
        },
        "batch": {"size": arguments.batch},
        "classes": {"sampling": "none", "every_class": False},
        "train": {"learning_rate": 1.0e-3},
        "schedule": {"name": "linear", "warmup": 0.05},
        "evaluate": {"every": None, "probe": 0},
        "save": {"every": None},
    }


def _write(arguments: argparse.Namespace, data: str, noise: float, seed: int, folder: Path) -> None:
    """The rows of a seed: those that train, some labelled wrongly, and held-out, target and test rows."""
    if (folder / "test.csv").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    train, test = _banking77(arguments.banking77) if data == "banking77" else _clinc150(arguments.clinc150)
    chance = np.random.default_rng(seed)
    names = np.sort(chance.permutation(sorted(train["label"].unique()))[: arguments.classes])
    train, test = (rows[rows["label"].isin(names)] for rows in (train, test))
    train = train.drop_duplicates("text").sample(frac=1, random_state=seed).reset_index(drop=True)
    held_out, target, train = train[-60:], train[-160:-60], train[:-160][: arguments.rows]
    wrong = chance.choice(len(train), size=round(noise * len(train)), replace=False)
    label = train["label"].to_numpy().copy()
    number = np.searchsorted(names, label[wrong])
    label[wrong] = names[(number + chance.integers(1, len(names), size=len(wrong))) % len(names)]
    train.assign(label=label).to_csv(folder / "train.csv", index=False)
    held_out.to_csv(folder / "held_out.csv", index=False)
    target.to_csv(folder / "target.csv", index=False)
    test.sample(frac=1, random_state=seed)[: arguments.tested].to_csv(folder / "test.csv", index=False)


def _banking77(folder: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    found = [pd.read_csv(folder / f"{name}.csv").set_axis(["text", "label"], axis=1) for name in ("train", "test")]
    return found[0], found[1]


def _clinc150(folder: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    parts = json.loads((folder / "data_full.json").read_text(encoding="utf-8"))
    return pd.DataFrame(parts["train"], columns=["text", "label"]), pd.DataFrame(
        parts["test"], columns=["text", "label"]
    )


def _folder(data: str, noise: float, seed: int) -> str:
    return f"{data}-{noise:g}-{seed}"


def _name(data: str, noise: float, seed: int, arm: str) -> str:
    return f"{_folder(data, noise, seed)}/{_word(arm)}"


def _word(arm: str) -> str:
    return arm.replace(" ", "-").replace(",", "").replace("(", "").replace(")", "")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("banking77", type=Path)
    parser.add_argument("clinc150", type=Path)
    parser.add_argument("overrides", nargs="*", help="key=value")
    parser.add_argument("--model", required=True, help="folder of a small encoder, such as all-MiniLM-L6-v2")
    parser.add_argument("--classes", type=int, default=20)
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--steps", type=int, default=75)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tested", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sets", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--arms", action="append", help="part of the names of arms to run; all without it")
    parser.add_argument("--out", type=Path, default=Path("runs/label_methods"))
    parser.add_argument("--json", type=Path)
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    main()
