"""Gains of each stage of crossval/combo where labels are few: 30 intents of CLINC150, 10 labels each.

    python scripts/bench/few_labels.py data_full.json --model FOLDER [--seeds 3] [key=value ...]

For each seed other rows are labelled, the rest have no label, and everything is trained anew. Prints the mean and
spread over seeds of every stage, out of fold and on the 900 test rows, which no stage looks at, and how far the end is
from the supervised ensemble.
CLINC150: Larson et al. 2019, CC BY 3.0.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from safetensors.numpy import load_file

import workbench
from workbench.data.labelled.labels import Labels

INTENTS, LABELLED = 30, 10
SETTINGS = (
    "data.limit=null",
    "data.max_tokens=64",
    "batch.size=16",
    "train.epochs=10",
    "tta={views: [typos, drop_words]}",
    "folds.refit=false",
)


def main(arguments: argparse.Namespace) -> None:
    rows = json.loads(arguments.data.read_text())
    intents = random.Random(0).sample(sorted({intent for _, intent in rows["train"]}), INTENTS)
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for seed in range(arguments.seeds):
        folder = arguments.out / f"seed-{seed}"
        words = [*_write(rows, intents, folder, seed), f"model.id={arguments.model}", f"seed={seed}", *SETTINGS]
        run = workbench.run("crossval/combo", [*words, *arguments.overrides], out=folder / "run")
        for stage, scores in _stages(run).items():
            found[stage].append(scores)
        _show(found)


def _write(rows: dict[str, list[list[str]]], intents: list[str], folder: Path, seed: int) -> list[str]:
    """The files of a seed; returns the words that name them."""
    folder.mkdir(parents=True)
    train = pd.DataFrame(rows["train"], columns=["text", "label"])
    train = train[train["label"].isin(intents)].sample(frac=1, random_state=seed)
    few = train.groupby("label").head(LABELLED)
    few.to_csv(folder / "train.csv", index=False)
    train.drop(few.index)[["text"]].to_csv(folder / "unlabelled.csv", index=False)
    test = pd.DataFrame(rows["test"], columns=["text", "label"])
    test[test["label"].isin(intents)].to_csv(folder / "test.csv", index=False)
    names = {"data.train": "train", "data.test": "test", "pseudo_label.unlabelled": "unlabelled"}
    return [f"{key}={folder / name}.csv" for key, name in names.items()]


def _stages(run: Path) -> dict[str, dict[str, float]]:
    """Accuracy after each stage, in percent: what is kept after it, and what it would have been."""
    told = json.loads((run / "stages.json").read_text())["stages"]
    found = {"one adapter": {"test": 100 * _alone(run)}}
    kept: dict[str, Any] = {}
    for stage in told:
        kept = stage if stage["accepted"] else kept
        found[stage["name"]] = {
            "oof": 100 * kept["oof"]["accuracy"],
            "test": 100 * kept["test"]["accuracy"],
            "kept": float(stage["accepted"]),
            "test, had it been kept": 100 * (stage["test"] or kept["test"])["accuracy"],
            "loss": kept["test"]["loss"],
        }
    return found


def _alone(run: Path) -> float:
    """Mean accuracy of the supervised adapters, each by itself, on test."""
    labels = Labels(**{**json.loads((run / "classes.json").read_text())})
    number = {name: index for index, name in enumerate(labels.names)}
    true_T = pd.read_parquet(run / "predictions.parquet")["label"].map(number).to_numpy()
    test_MTC = load_file(run / "members" / "round-0" / "outputs.safetensors")["test"]
    return float((test_MTC.argmax(2) == true_T).mean())


def _show(results: dict[str, list[dict[str, float]]]) -> None:
    for stage, scores in results.items():
        cells = []
        for name in scores[0]:
            values = [each[name] for each in scores]
            cells.append(f"{name} {np.mean(values):.2f} +- {np.std(values, ddof=min(1, len(values) - 1)):.2f}")
        print(f"{stage:16} {'   '.join(cells)}", flush=True)
    first, *_, last = (scores for stage, scores in results.items() if stage != "one adapter")
    worst = min(end["test"] - start["test"] for start, end in zip(first, last, strict=True))
    print(f"end minus supervised ensemble on test, worst of {len(first)} seeds: {worst:+.2f} points", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="CLINC150's data_full.json")
    parser.add_argument("overrides", nargs="*", help="key=value")
    parser.add_argument("--model", required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/few_labels"))
    main(parser.parse_args())
