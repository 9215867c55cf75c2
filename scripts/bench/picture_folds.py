"""Five folds of pictures as `workbench run crossval/...` in one bank, against five runs of transformers' Trainer.

    python scripts/bench/picture_folds.py PICTURES [--group '(.+)_'] [--limit 1000] [--epochs 5] [--pairs 2]

PICTURES is a folder of class folders, `--group` a pattern that finds in a picture's name what must not be split. Both
sides have the same rows, folds, backbone, LoRA, epochs, rows a step, peak rate and schedule, and no augmentation. Each
has the precision that it takes unless told: the Trainer float32 (`--bf16`: its autocast), ours what `model.weights`
(`auto`) finds best on the device. Ours is the whole command: it also finds duplicates, calibrates, scores what was
saved, and writes the report. Times are of whole processes, in turn; accuracies are of all held-out rows.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measuring

from workbench.evaluation.metrics import accuracy_interval

HERE = Path(__file__).parent
LINEAR = ["schedule.name=linear", "schedule.warmup=0.05", "classes.sampling=none"]


@dataclass(frozen=True)
class Result:
    """One side: its processes together."""

    name: str
    wall_s: float
    cpu_s: float
    peak_bytes: int
    right: int
    rows: int

    def __str__(self) -> str:
        share, low, high = vars(accuracy_interval(self.right, self.rows)).values()
        return (
            f"{self.name:8} {self.wall_s:8.1f} {self.cpu_s:8.1f} {self.peak_bytes / 1e9:8.2f} {share:9.4f}"
            f"  95 % interval {low:.4f} to {high:.4f}"
        )


def main() -> None:
    arguments = _arguments()
    print(machine := measuring.machine(arguments.device, ("torch", "transformers", "peft")))
    print(f"{'':8} {'wall s':>8} {'cpu s':>8} {'peak GB':>8} {'accuracy':>9}")
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="bench-pictures-") as name:
        folder = Path(name)
        rows = _rows(folder, arguments)
        for pair in range(arguments.pairs):
            for side in (_ours, _theirs):
                out = folder / f"{side.__name__}{pair}"
                out.mkdir()
                results.append(side(rows, out, arguments))
                print(results[-1], flush=True)
    ours, theirs = ([result for result in results if result.name == side] for side in ("bank", "Trainer"))
    ratios = {
        field: measuring.ratio([getattr(each, field) for each in ours], [getattr(each, field) for each in theirs])
        for field in ("wall_s", "cpu_s", "peak_bytes")
    }
    print(*(f"{field}: {ratio} times the Trainer's" for field, ratio in ratios.items()), sep="\n")
    measuring.write_report(arguments, machine=machine, runs=results, ratios=ratios)


def _arguments() -> argparse.Namespace:
    parser = measuring.parser(__doc__ or "")
    parser.add_argument("pictures", type=Path)
    parser.add_argument("--model", default="starter/vision")
    parser.add_argument("--limit", type=int, default=1000, help="pictures, classes in turn")
    parser.add_argument("--group", help="pattern whose first group names what must not be split")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--weights", default="auto", help="of ours; float32 for the Trainer's precision")
    parser.add_argument("--bf16", action="store_true", help="the Trainer's own bfloat16, which its default is not")
    return parser.parse_args()


def _rows(folder: Path, arguments: argparse.Namespace) -> Path:
    """Write rows.csv with the columns image, label and fold; each class, or the groups, are dealt evenly to folds."""
    from workbench.data.images.picture_sources import read_rows

    path, dealt, groups = folder / "rows.csv", dict[str, int](), dict[str, int]()
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "label", "fold"])
        for row in list(read_rows(str(arguments.pictures)))[: arguments.limit]:
            picture, label = row.columns["image"].path.resolve(), row.columns["label"]
            dealt[label] = dealt.get(label, -1) + 1
            group = measuring.group(arguments.group, picture.name)
            fold = groups.setdefault(group, len(groups)) if arguments.group else dealt[label]
            writer.writerow([picture, label, fold % arguments.folds])
    return path


def _ours(rows: Path, out: Path, arguments: argparse.Namespace) -> Result:
    recipe = out / "folds.yaml"
    recipe.write_text("recipe: crossval\n")
    words = [
        f"model.id={arguments.model}", f"model.weights={arguments.weights}", "data.format=image", f"data.train={rows}",
        "folds.column=fold", f"folds.k={arguments.folds}", f"adapter={{method: lora, rank: {arguments.rank}}}",
        f"adapter.alpha={2 * arguments.rank}", f"train.epochs={arguments.epochs}", f"batch.size={arguments.batch}",
        f"train.learning_rate={arguments.lr}", "evaluate.every=null", "save.every=null", *LINEAR,
    ]  # fmt: skip
    program = str(Path(sys.executable).with_name("workbench"))
    usage = measuring.run([program, "run", str(recipe), *words, "--out", str(out / "run")], out / "log", "cpu")
    scores = json.loads((out / "run" / "scores.json").read_text())
    count = sum(1 for _ in rows.open(encoding="utf-8")) - 1
    return Result("bank", *usage, right=round(scores["after"]["accuracy"] * count), rows=count)


def _theirs(rows: Path, out: Path, arguments: argparse.Namespace) -> Result:
    usages, said = [], list[dict[str, Any]]()
    model = _folder(arguments.model)
    for fold in range(arguments.folds):
        command = [
            sys.executable,
            str(HERE / "peer_pictures.py"),
            model,
            str(rows),
            "--fold",
            f"{fold}/{arguments.folds}",
        ]
        for option in ("epochs", "batch", "rank", "lr"):
            command += [f"--{option}", str(getattr(arguments, option))]
        command += ["--seed", str(fold), "--out", str(out / f"fold-{fold}"), *["--bf16"] * arguments.bf16]
        usages.append(measuring.run(command, out / f"log-{fold}", arguments.device))
        said.append(measuring.last_line(out / f"log-{fold}"))
    return Result(
        "Trainer",
        sum(usage.wall_s for usage in usages),
        sum(usage.cpu_s for usage in usages),
        max(usage.peak_bytes for usage in usages),
        right=sum(each["right"] for each in said),
        rows=sum(each["held_out_rows"] for each in said),
    )


def _folder(model: str) -> str:
    from workbench.data import starter

    return starter.resolve(model)


if __name__ == "__main__":
    main()
