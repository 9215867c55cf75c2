"""Planted wrong labels in Banking77: how many crossval finds, and what training without them gives back.

    python scripts/bench/label_noise.py banking77/train.csv banking77/test.csv --model FOLDER [--seeds 3] [key=value]

For each seed a share of the training labels is replaced by another class, drawn uniformly. Two cross-validations: one
on the true labels, and one on the planted ones with data.drop_suspects. Prints, of the planted labels, how many
suspects.parquet names (found) and how many of those that it names are planted (precision), also of its most suspect
rows alone that hold 80 % of the planted ones; the accuracy of all adapters together on the test rows, whose labels are
true, with true labels, with planted ones and without the suspects; the share of the lost accuracy that comes back,
whether or not the gate kept the stage, where as many test rows again could not lose as much by chance (95 %); and what
the gate cannot know: by true labels, how much righter the rows are out of fold, all alike and as the mean over classes,
as test rows show it that have as many of each class. Banking77 has wrong labels of its own, which count here as not
planted. Finished runs are not run again.
Banking77: Casanueva et al. 2020, CC BY 4.0.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measuring
import numpy as np
import numpy.typing as npt
import pandas as pd
from measuring import Spread, Wanted
from safetensors.numpy import load_file

COLUMNS = ("found", "precision", "most_suspect", "true", "planted", "dropped", "back", "kept", "rows", "classes")
ENOUGH = 0.8
"""Share of the planted labels that the most suspect rows are to hold."""
BEFORE, AFTER = 0, 2
"""Rounds of training, of the planted labels: all rows, and without the suspects."""
TITLES = {
    "found": "planted labels found",
    "precision": "precision",
    "most_suspect": "precision where 80 % are found",
    "true": "accuracy, true labels",
    "planted": "accuracy, planted labels",
    "dropped": "accuracy, without suspects",
    "back": "share of the loss that comes back",
    "kept": "kept by the gate",
    "rows": "gain out of fold, true labels",
    "classes": "the same, mean over classes",
}


def main(arguments: argparse.Namespace) -> None:
    found: list[dict[str, float]] = []
    for seed in range(arguments.seeds):
        folder = arguments.out / f"seed-{seed}"
        planted = _plant(arguments, folder, seed)
        wanted = {
            "true": Wanted(_recipe(arguments, folder, seed, "true"), arguments.overrides),
            "planted": Wanted(_recipe(arguments, folder, seed, "planted"), arguments.overrides),
        }
        runs = measuring.finish(wanted, folder, jobs=1, device=arguments.device)
        found.append(_measured(runs, planted))
        head = ["", *TITLES.values()]
        rows = [[f"seed {number}", *(_told([each[name]]) for name in COLUMNS)] for number, each in enumerate(found)]
        mean = ["mean", *(_told([each[name] for each in found]) for name in COLUMNS)]
        print(measuring.markdown([head, *rows, mean]), flush=True)


def _plant(arguments: argparse.Namespace, folder: Path, seed: int) -> frozenset[str]:
    """Write the rows with true and with planted labels; returns the texts of those that are planted."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = pd.read_csv(arguments.train).set_axis(["text", "label"], axis=1)
    rows = rows.drop_duplicates("text").sample(frac=1, random_state=seed)
    rows = rows.head(arguments.limit or len(rows)).reset_index(drop=True)
    names = np.asarray(sorted(rows["label"].unique()))
    chance = np.random.default_rng(seed)
    wrong = chance.choice(len(rows), size=round(arguments.noise * len(rows)), replace=False)
    number = np.searchsorted(names, rows["label"].to_numpy()[wrong])
    noisy = rows["label"].to_numpy().copy()
    noisy[wrong] = names[(number + chance.integers(1, len(names), size=len(wrong))) % len(names)]
    rows.to_csv(folder / "true.csv", index=False)
    rows.assign(label=noisy).to_csv(folder / "planted.csv", index=False)
    test = pd.read_csv(arguments.test).set_axis(["text", "label"], axis=1).sample(frac=1, random_state=0)
    test.head(arguments.tested or len(test)).to_csv(folder / "test.csv", index=False)
    return frozenset(rows["text"][wrong])


def _recipe(arguments: argparse.Namespace, folder: Path, seed: int, labels: str) -> dict[str, Any]:
    here = folder.resolve()
    return {
        "recipe": "crossval",
        "seed": seed,
        "model": {"id": arguments.model, "weights": "auto"},
        "adapter": {"method": "lora", "rank": 16, "alpha": 32, "targets": "all-linear"},
        "data": {
            "train": str(here / f"{labels}.csv"),
            "test": str(here / "test.csv"),
            "max_tokens": 64,
            "drop_suspects": labels == "planted",
            "overlap": "drop",
        },
        "batch": {"size": 32},
        "train": {"epochs": 5, "learning_rate": 1.0e-3},
        "schedule": {"name": "linear", "warmup": 0.05},
        "evaluate": {"every": None},
    }


def _measured(runs: dict[str, Path], planted: frozenset[str]) -> dict[str, float]:
    suspects = pd.read_parquet(runs["planted"] / "suspects.parquet")
    seen = pd.read_parquet(runs["planted"] / "out_of_fold.parquet")["text"]
    named = suspects["text"].isin(planted)
    before, after = _stage(runs["planted"], "calibration"), _stage(runs["planted"], "drop_suspects")
    true, tested = _stage(runs["true"], "calibration"), len(pd.read_csv(runs["planted"].with_name("test.csv")))
    accuracy = {name: each["test"]["accuracy"] for name, each in (("true", true), ("planted", before))}
    dropped = (after["test"] or before["test"])["accuracy"]
    lost = accuracy["true"] - accuracy["planted"]
    return accuracy | {
        "found": float(named.sum() / seen.isin(planted).sum()),
        "precision": float(named.mean()),
        "most_suspect": _precision_of_first(named.to_numpy(), round(ENOUGH * seen.isin(planted).sum())),
        "dropped": dropped,
        "back": (dropped - accuracy["planted"]) / lost if lost > _chance(accuracy["true"], tested) else float("nan"),
        "kept": float(after["accepted"]),
        **_gain_by_true_labels(runs["planted"]),
    }


def _gain_by_true_labels(run: Path) -> dict[str, float]:
    """How much righter rows out of fold are without the suspects, by their true labels."""
    told = pd.read_parquet(run / "out_of_fold.parquet")
    names = np.asarray([name.removeprefix("p_") for name in told.columns if name.startswith("p_")])
    true = pd.read_csv(run.with_name("true.csv")).set_index("text")["label"]
    label_N = told["text"].map(true).to_numpy()
    right_N = {number: names[_outputs(run, number).argmax(1)] == label_N for number in (BEFORE, AFTER)}
    gain = pd.Series(right_N[AFTER].astype(float) - right_N[BEFORE])
    return {"rows": float(gain.mean()), "classes": float(gain.groupby(label_N).mean().mean())}


def _outputs(run: Path, number: int) -> npt.NDArray[np.float64]:
    """Outputs (N, C) of a round for the rows, each by the one adapter that did not train on it; zeros by the others."""
    found: npt.NDArray[np.float64] = load_file(run / f"members/round-{number}/outputs.safetensors")["oof"].sum(0)
    return found


def _precision_of_first(named_N: npt.NDArray[np.bool_], wanted: int) -> float:
    """Share that is planted of the first rows which hold so many of the planted ones; not a number where none do."""
    found_N = named_N.cumsum()
    if not wanted or found_N[-1] < wanted:
        return math.nan
    return wanted / (1 + int(np.searchsorted(found_N, wanted)))


def _told(values: Sequence[float]) -> str:
    """Mean and spread of the seeds that have a value."""
    known = [value for value in values if not math.isnan(value)]
    return str(Spread.of(known)) if known else "-"


def _chance(accuracy: float, rows: int) -> float:
    """Difference of the accuracies of two samples of so many rows that chance exceeds in 2.5 %."""
    return 1.96 * math.sqrt(2 * accuracy * (1 - accuracy) / rows)


def _stage(run: Path, name: str) -> dict[str, Any]:
    stages: list[dict[str, Any]] = json.loads((run / "stages.json").read_text(encoding="utf-8"))["stages"]
    return next(each for each in stages if each["name"] == name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path, help="Banking77's train.csv")
    parser.add_argument("test", type=Path, help="its test.csv")
    parser.add_argument("overrides", nargs="*", help="key=value")
    parser.add_argument("--model", default="starter")
    parser.add_argument("--noise", type=float, default=0.1, help="share of the labels that are planted")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit", type=int, help="rows of each seed; all without it")
    parser.add_argument("--tested", type=int, help="test rows; all without it")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("runs/label_noise"))
    main(parser.parse_intermixed_args())
