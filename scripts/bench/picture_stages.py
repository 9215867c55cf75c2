"""Gains of each stage of crossval/pictures, against one adapter on the same labelled pictures, over seeds.

    python scripts/bench/picture_stages.py [--pictures FOLDER --group '(.+)_'] [--seeds 3] [key=value ...]

FOLDER has class folders; without one, the pictures are those of the recipe. `--group` is a pattern that finds in a
picture's name what must not be split, a person or a slide. For each seed other pictures are labelled, a third of all
groups is test, which no stage looks at, and the rest has no label. Finished runs are not run again.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import measuring
import numpy as np
import pandas as pd
from scipy import stats

import workbench
from workbench.data.images.picture_sources import read_rows

TEST = 1 / 3
SHIPPED = {
    "data.train": "starter/sign_digits.zip/train",
    "data.test": "starter/sign_digits.zip/test",
    "pseudo_label.unlabelled": "starter/sign_digits.zip/unlabelled",
}
SAME = ("train.epochs=16", "batch.size=16")
"""One adapter trains with the settings of the folds."""


def main(arguments: argparse.Namespace) -> None:
    ends, effects = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for seed in range(arguments.seeds):
        folder = arguments.out / f"seed-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        words = [f"data.limit={arguments.labelled}", f"seed={seed}"]
        files = _write(folder, seed, arguments) if arguments.pictures else SHIPPED
        told = _stages(_run("crossval/pictures", folder / "folds", [*words, *_named(files), *arguments.overrides]))
        rows = {"data.train": files["data.train"], "data.held_out": files["data.test"]}
        one = _run("vision/quickstart", folder / "one", [*words, *_named(rows), *SAME])
        ends["one adapter"].append(json.loads((one / "scores.json").read_text())["after"]["accuracy"])
        before: dict[str, Any] = {}
        for stage in told:
            test = stage["test"] or before
            if before:
                effects[stage["name"]].append(100 * (test["accuracy"] - before["accuracy"]))
                print(f"seed {seed}  {stage['name']:14} {'kept   ' if stage['accepted'] else 'refused'} {stage['why']}")
            before = test if stage["accepted"] else before
            ends[f"after {stage['name']}"].append(before["accuracy"])
    print("\naccuracy on test")
    for name, values in ends.items():
        print(f"{name:24} {_spread([100 * each for each in values])}")
    print("\npoints that a stage gives on test, or would have given, had it been kept")
    for name, values in effects.items():
        print(f"{name:24} {_spread(values)}")
    gained = [100 * (last - one) for one, last in zip(ends["one adapter"], list(ends.values())[-1], strict=True)]
    print(f"{'all, against one adapter':24} {_spread(gained)}")


def _run(recipe: str, out: Path, words: list[str]) -> Path:
    return out if (out / "report.html").exists() else workbench.run(recipe, words, out=out)


def _named(files: dict[str, str]) -> list[str]:
    return [f"{key}={file}" for key, file in files.items()]


def _write(folder: Path, seed: int, arguments: argparse.Namespace) -> dict[str, str]:
    """The tables of a seed, by what the recipe calls them."""
    rows = pd.DataFrame(
        {"image": str(row.columns["image"].path.resolve()), "label": row.columns["label"]}
        for row in read_rows(str(arguments.pictures))
    )
    rows["group"] = [measuring.group(arguments.group, Path(path).name) for path in rows["image"]]
    groups = np.random.default_rng(seed).permutation(sorted(set(rows["group"])))
    tested = rows["group"].isin(groups[: round(TEST * len(groups))])
    rows.pop("group")
    rows[tested].to_csv(folder / "test.csv", index=False)
    rest = rows[~tested].sample(frac=1, random_state=seed)
    rest[: arguments.labelled].to_csv(folder / "train.csv", index=False)
    rest[arguments.labelled :][["image"]].to_csv(folder / "unlabelled.csv", index=False)
    names = {"data.train": "train", "data.test": "test", "pseudo_label.unlabelled": "unlabelled"}
    return {key: f"{folder / name}.csv" for key, name in names.items()}


def _stages(run: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((run / "stages.json").read_text())["stages"]
    return found


def _spread(values: list[float]) -> str:
    """Mean of the seeds, and its 95 % interval by Student's t."""
    half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{np.mean(values):7.2f}  95 % interval {np.mean(values) - half:.2f} to {np.mean(values) + half:.2f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="key=value, of the folds")
    parser.add_argument("--pictures", type=Path)
    parser.add_argument("--group", help="pattern whose first group names what must not be split")
    parser.add_argument("--labelled", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/picture_stages"))
    main(parser.parse_args())
