"""Answers to unequal classes compared: six Banking77 intents, of which one is rare.

    python scripts/bench/unequal_classes.py train.csv test.csv --model FOLDER [--rarest 9] [--seeds 3] [key=value ...]

For each seed other rows are drawn and every adapter is trained anew. Test rows are 40 of each intent. Prints means and
spreads over seeds: macro F1 of the test rows, recall of the rarest intent, and accuracy where intents are as frequent
as in training (recall of each intent, weighted by its share), each also against drawing every row once, paired by seed.
Banking77: Casanueva et al. 2020, CC BY 4.0.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.metrics import f1_score, recall_score

import workbench

COUNTS = {
    "card_payment_fee_charged": 114,
    "pending_card_payment": 112,
    "transfer_not_received_by_recipient": 107,
    "balance_not_updated_after_bank_transfer": 82,
    "pending_transfer": 77,
    "failed_transfer": 9,
}
"""Training rows of each intent, with the shares of TREC's six coarse classes."""
RAREST = "failed_transfer"
ANSWERS = (
    "classes.sampling=none",
    "classes.logit_adjustment=1",
    "classes.weights=balanced",
    "classes.sampling=over",
    "classes.sampling=even",
)
SETTINGS = ("data.limit=null", "data.held_out=0.1")
Scores = dict[str, float]


def main(arguments: argparse.Namespace) -> None:
    counts = {**COUNTS, RAREST: arguments.rarest}
    train, test = (pd.read_csv(path, names=["text", "label"], skiprows=1) for path in (arguments.train, arguments.test))
    test = test[test["label"].isin(list(COUNTS))]
    scores: dict[str, list[Scores]] = {answer: [] for answer in ANSWERS}
    for seed in range(arguments.seeds):
        folder = arguments.out / f"seed-{seed}"
        folder.mkdir(parents=True)
        drawn = [train[train["label"] == name].sample(count, random_state=seed) for name, count in counts.items()]
        pd.concat(drawn).sample(frac=1, random_state=seed).to_csv(folder / "train.csv", index=False)
        test.to_csv(folder / "test.csv", index=False)
        words = [f"data.train={folder}/train.csv", f"data.test={folder}/test.csv", f"model.id={arguments.model}"]
        for number, answer in enumerate(ANSWERS):
            given = [*SETTINGS, *words, f"seed={seed}", answer, *arguments.overrides]
            run = workbench.run("classify/quickstart", given, out=folder / f"run-{number}")
            scores[answer].append(_scores(run, counts))
        _show(scores)


def _scores(run: Path, counts: dict[str, int]) -> Scores:
    """Test scores of a run, in percent."""
    rows = pd.read_parquet(run / "predictions.parquet")
    names = list(COUNTS)
    recall_C = recall_score(rows["label"], rows["predicted"], labels=names, average=None)
    return {
        "macro F1": 100 * float(f1_score(rows["label"], rows["predicted"], labels=names, average="macro")),
        "recall of the rarest": 100 * float(recall_C[-1]),
        "accuracy at training's shares": 100 * float(np.average(recall_C, weights=list(counts.values()))),
    }


def _show(scores: dict[str, list[Scores]]) -> None:
    for answer, runs in scores.items():
        cells = []
        for name in runs[0]:
            values = np.array([run[name] for run in runs])
            gains = values - [run[name] for run in scores[ANSWERS[0]][: len(values)]]
            spread = np.std(gains, ddof=min(1, len(gains) - 1))
            cells.append(f"{name} {values.mean():.1f} (gain {gains.mean():+.1f} +- {spread:.1f})")
        print(f"{answer:28} {'   '.join(cells)}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path, help="Banking77's train.csv")
    parser.add_argument("test", type=Path, help="Banking77's test.csv")
    parser.add_argument("overrides", nargs="*", help="key=value")
    parser.add_argument("--model", required=True)
    parser.add_argument("--rarest", type=int, default=COUNTS[RAREST], help="training rows of the rarest intent")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/unequal_classes"))
    main(parser.parse_args())
