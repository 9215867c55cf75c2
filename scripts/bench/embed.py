"""Train sentence embeddings of classes, ours and with sentence-transformers in turn; print scores and times.

    python scripts/bench/embed.py --model FOLDER --train banking77/train.csv --test banking77/test.csv --label category
    python scripts/bench/embed.py --model FOLDER --train clinc150/data_full.json --json embed.json

Each side is a process of its own: LoRA of rank 16 on the linear layers of the blocks, one epoch over the same rows in
batches of as many, the same learning rate, schedule and temperature, the backbone's dropout off. Ours reads texts with
classes, draws positives itself and takes no text of a class for a negative of another; sentence-transformers gets each
text with another one of its class, drawn once. Time is processor time of a step, from the end of the third to the end
of the last. The score is the accuracy of the nearest training text on test rows, with Wilson's 95 % interval.
"""

from __future__ import annotations

import json
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import NamedTuple

import measuring
import numpy as np
import pandas as pd
from scipy import stats

HERE = Path(__file__).parent
TARGET = 1.5
"""Their processor time of a step through ours."""


class Result(NamedTuple):
    """One run."""

    side: str
    step_s: float
    """Processor time of a step, in seconds."""
    accuracy: float
    low: float
    high: float
    peak_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.side:24} {self.step_s:8.3f} s a step   accuracy {self.accuracy:.3f} ({self.low:.3f} to "
            f"{self.high:.3f})   {self.peak_bytes / 1e9:.2f} GB"
        )


def main(arguments: Namespace) -> None:
    print(measuring.machine(arguments.device, ["torch", "transformers", "sentence-transformers", "peft"]))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(arguments, folder)
        sides = [f"ours {weights}" for weights in arguments.weights] + ["sentence-transformers"]
        results = []
        for number in range(arguments.pairs):
            for side in sides:
                results.append(train(side, folder, number, arguments))
                print(results[-1], flush=True)
    theirs = [each.step_s for each in results if each.side == sides[-1]]
    ratios = {side: measuring.ratio(theirs, [each.step_s for each in results if each.side == side]) for side in sides}
    for side in sides[:-1]:
        print(f"sentence-transformers takes {ratios[side]} times the processor time of a step of {side}")
    measuring.write_report(arguments, results=[each._asdict() for each in results], ratios=ratios, target=TARGET)


def write_rows(arguments: Namespace, folder: Path) -> None:
    """Write train.csv, test.csv and pairs.jsonl: rows drawn evenly from all, each with another text of its class."""
    train, test = read(arguments)
    generator = np.random.default_rng(arguments.seed)
    train, test = (
        rows.iloc[generator.permutation(len(rows))[:count]]
        for rows, count in ((train, arguments.rows), (test, arguments.test_rows))
    )
    train = train[train.groupby("label")["text"].transform("size") > 1]
    test = test[test["label"].isin(set(train["label"]))]
    groups = train.groupby("label")["text"].agg(list)
    with (folder / "pairs.jsonl").open("w", encoding="utf-8") as file:
        for text, label in train[["text", "label"]].itertuples(index=False):
            others = [each for each in groups[label] if each != text]
            if others:
                positive = others[generator.integers(len(others))]
                file.write(json.dumps({"anchor": text, "positive": positive}) + "\n")
    train.to_csv(folder / "train.csv", index=False)
    test.to_csv(folder / "test.csv", index=False)


def read(arguments: Namespace) -> list[pd.DataFrame]:
    """Training and test rows with the columns text and label; each text once."""
    if arguments.train.suffix == ".json":
        splits = json.loads(arguments.train.read_text(encoding="utf-8"))
        found = [pd.DataFrame(splits[name], columns=["text", "label"]) for name in ("train", "test")]
    else:
        columns = {arguments.text: "text", arguments.label: "label"}
        paths = (arguments.train, arguments.test)
        found = [pd.read_csv(path, keep_default_na=False).rename(columns=columns) for path in paths]
    found = [rows.drop_duplicates("text") for rows in found]
    return [found[0], found[1][~found[1]["text"].isin(set(found[0]["text"]))]]


def train(side: str, folder: Path, number: int, arguments: Namespace) -> Result:
    """One run of a side."""
    out = folder / f"{side.replace(' ', '-')}-{number}"
    command = ours(side, out, folder, arguments) if side.startswith("ours") else theirs(folder, arguments)
    usage = measuring.run(command, out.with_suffix(".log"), arguments.device)
    said = measuring.last_line(out.with_suffix(".log"))
    ends = said["processor_s"][measuring.WARM_UP :]
    if "hits" in said:
        hits, rows = said["hits"], said["rows"]
    else:
        found = pd.read_parquet(out / "predictions.parquet")
        hits, rows = int((found["label"] == found["nearest_label"]).sum()), len(found)
    interval = stats.binomtest(hits, rows).proportion_ci(method="wilson")
    step_s = (ends[-1] - ends[0]) / (len(ends) - 1)
    return Result(side, step_s, hits / rows, float(interval.low), float(interval.high), usage.peak_bytes)


def ours(side: str, out: Path, folder: Path, arguments: Namespace) -> list[str]:
    words = {
        "model.id": arguments.model,
        "model.weights": side.partition(" ")[2],
        "data.train": folder / "train.csv",
        "data.held_out": folder / "test.csv",
        "data.overlap": "drop",
        "batch.size": arguments.batch,
        "train.epochs": 1,
        "train.learning_rate": arguments.rate,
        "evaluate.every": "null",
        "save.every": "null",
        "seed": arguments.seed,
    }
    settings = [f"{key}={value}" for key, value in words.items()]
    return [sys.executable, str(HERE / "our_steps.py"), "embed/quickstart", str(out), *settings]


def theirs(folder: Path, arguments: Namespace) -> list[str]:
    files = [str(folder / name) for name in ("pairs.jsonl", "train.csv", "test.csv")]
    options = ["--batch", str(arguments.batch), "--rate", str(arguments.rate)]
    return [sys.executable, str(HERE / "peer_embed.py"), arguments.model, *files, *options]


if __name__ == "__main__":
    parser = measuring.parser(__doc__ or "")
    parser.add_argument("--model", required=True, help="folder of a sentence encoder, such as all-MiniLM-L6-v2")
    parser.add_argument("--train", type=Path, required=True, help="csv, or CLINC150's data_full.json")
    parser.add_argument("--test", type=Path, help="csv")
    parser.add_argument("--text", default="text", help="column of the texts")
    parser.add_argument("--label", default="label", help="column of the classes")
    parser.add_argument("--rows", type=int, default=2048, help="training rows")
    parser.add_argument("--test-rows", type=int, default=1000, help="test rows")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--weights", nargs="+", default=["auto"], help="model.weights of ours, a side for each")
    main(parser.parse_args())
