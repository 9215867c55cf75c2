"""Five folds of questions about pictures in one bank, against five runs of `sft`: time, memory and scores.

    python scripts/bench/picture_text_folds.py [--limit 400] [--epochs 2] [--tower starter|clip] [--pairs 2]

Rows are those of `sft/vision-language`. `starter` is its model; `clip` a stock LLaVA of random values with CLIP's
ViT-B/16 at 224 pixels, whose outputs the folds of a bank share. Each side is whole processes with a cache of its own:
they read the pictures, train, score what was saved, and write their pages. Both have the same folds, seeds, LoRA and
steps.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import measuring
import pandas as pd
import picture_features

os.environ.pop("WORKBENCH_CACHE", None)  # each process has a cache of its own
FOLDS = 5


class Result(NamedTuple):
    """One side: its processes together."""

    name: str
    wall_s: float
    cpu_s: float
    peak_bytes: int
    losses: pd.Series
    """Held-out loss of each row."""

    def __str__(self) -> str:
        return (
            f"{self.name:10} {self.wall_s:8.1f} {self.cpu_s:8.1f} {self.peak_bytes / 1e9:8.2f} "
            f"{self.losses.mean():9.5f}"
        )


def main(arguments: argparse.Namespace) -> None:
    print(machine := measuring.machine(arguments.device, ("torch", "transformers", "peft")))
    print(f"{'':10} {'wall s':>8} {'cpu s':>8} {'peak GB':>8} {'loss':>9}")
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="bench-folds-") as name:
        folder = Path(name)
        words = [
            *(f"data.limit={arguments.limit}", f"train.epochs={arguments.epochs}"),
            *("model.weights=float32", "evaluate.answers=0", "evaluate.samples=0", "data.max_tokens=256"),
        ]
        if arguments.tower == "clip":
            picture_features.save(folder / "clip")
            words.append(f"model.id={folder / 'clip'}")
        for pair in range(arguments.pairs):
            for side in (_bank, _runs):
                results.append(side(folder / f"{side.__name__}{pair}", words))
                print(results[-1], flush=True)
    for field in ("wall_s", "cpu_s", "peak_bytes"):
        bank, runs = ([float(getattr(each, field)) for each in results[side::2]] for side in (0, 1))
        print(f"bank through five runs, {field}: {measuring.ratio(bank, runs)}")
    gaps = [(one.losses - other.losses).abs().max() for one, other in zip(results[::2], results[1::2], strict=True)]
    print(f"rows {len(results[0].losses)}, largest difference of a row's loss {max(gaps):.1e}")
    measuring.write_report(
        arguments, machine=machine, runs=[each._replace(losses=each.losses.mean()) for each in results]
    )


def _bank(out: Path, words: list[str]) -> Result:
    out.mkdir()
    folds = ["recipe=crossval", "of=sft", f"folds.k={FOLDS}", "folds.refit=false"]
    usage = measuring.run(_command(out / "run", [*words, "data.held_out=0.05", *folds]), out / "log", "cpu")
    losses = pd.read_parquet(out / "run" / "out_of_fold_held_out_losses.parquet")
    return Result("bank", *usage, losses.set_index("row")["loss"].sort_index())


def _runs(out: Path, words: list[str]) -> Result:
    out.mkdir()
    usages, tables = [], []
    for number in range(FOLDS):
        fold = f"data.fold={{of: {FOLDS}, number: {number}, near: 0.7}}"
        command = _command(out / f"run{number}", [*words, "data.held_out=0.05", fold])
        usages.append(measuring.run(command, out / f"log{number}", "cpu"))
        tables.append(pd.read_parquet(out / f"run{number}" / "held_out_losses.parquet"))
    losses = pd.concat(tables).set_index("row")["loss"].sort_index()
    wall, cpu = (sum(each[at] for each in usages) for at in (0, 1))
    return Result("five runs", wall, cpu, max(each.peak_bytes for each in usages), losses)


def _command(out: Path, words: list[str]) -> list[str]:
    return ["workbench", "run", "sft/vision-language", *words, "--out", str(out)]


if __name__ == "__main__":
    parser = measuring.parser(__doc__)
    parser.add_argument("--limit", type=int, default=400, help="rows")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--tower", choices=("starter", "clip"), default="starter")
    main(parser.parse_args())
