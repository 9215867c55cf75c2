"""Effect of each way to choose or order training rows, over paired seeds, at equal steps.

    python scripts/bench/data_methods.py gsm8k/ --out runs/data [--steps 90] [--seeds 3] [--json FILE]

The folder has GSM8K's train.jsonl and test.jsonl (Cobbe et al. 2021). The starter, 6 M parameters, trains by LoRA on a
mixture: 1,000 rows of GSM8K, the shipped 2,000 questions about fairy tales, and 500 rows of noise, which are questions
of GSM8K with the shuffled words of other answers. It is asked for GSM8K: 300 of its test rows are held out, and 150
other training rows are the target of by=importance and by=gradient. Arms that choose keep as many rows and train as
many steps as the random choice. Runs stand below --out, the seeds one after another; what is finished is not run again.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import measuring
import numpy as np
import standing
from standing import Wanted

from workbench import recipes
from workbench.data import starter
from workbench.schema import read_yaml

KEPT = 1_200
NOISE, WANTED_ROWS, TARGET, TESTED = 500, 1_000, 150, 300
CONTROL = "every row"
ARMS: dict[str, list[str]] = {
    CONTROL: [],
    "random choice": ["data.select.by=random", f"data.select.rows={KEPT}"],
    "by importance": [
        "data.select.by=importance",
        f"data.select.rows={KEPT}",
        "data.select.target={folder}/target.jsonl",
    ],
    "by gradient": [
        "data.select.by=gradient",
        f"data.select.rows={KEPT}",
        "data.select.target={folder}/target.jsonl",
    ],
    "by perplexity, middle": ["data.select.by=perplexity", f"data.select.rows={KEPT}"],
    "by perplexity, low": ["data.select.by=perplexity", "data.select.band=low", f"data.select.rows={KEPT}"],
    "by difficulty": ["data.select.by=ifd", f"data.select.rows={KEPT}"],
    "short rows first": ["data.curriculum.by=length"],
    "long rows first": ["data.curriculum.by=length", "data.curriculum.first=hard"],
}


def main() -> None:
    arguments = _arguments()
    write(arguments.gsm8k, arguments.out)
    recipe = read_yaml(recipes.find("sft/quickstart"))
    folder = arguments.out.resolve()
    shared = [
        f"data.train={folder}/train.jsonl",
        f"data.held_out={folder}/held_out.jsonl",
        "train.epochs=null",
        f"train.steps={arguments.steps}",
        "evaluate.every=null",
        "evaluate.answers=0",
    ]
    wanted = {
        _name(arm, seed): Wanted(recipe, [*shared, f"seed={seed}", *(word.format(folder=folder) for word in words)])
        for seed in range(arguments.seeds)
        for arm, words in ARMS.items()
    }
    runs = standing.finish(wanted, folder, jobs=1, device="cpu")
    loss = {
        arm: [standing.scores(runs[_name(arm, seed)])["after"]["loss"] for seed in range(arguments.seeds)]
        for arm in ARMS
    }
    rows: list[list[object]] = [["arm", "held-out loss", "less than with every row", "less than by a random choice"]]
    for arm, values in loss.items():
        others = [each if each != arm else None for each in (CONTROL, "random choice")]
        against = [standing.interval(np.asarray(loss[each]) - values, digits=3) if each else "" for each in others]
        rows.append([arm, f"{np.mean(values):.3f}", *against])
    print(standing.markdown(rows))
    machine = measuring.machine("cpu", ("torch", "transformers", "peft"))
    measuring.write_report(arguments, machine=machine, arms=loss)


def write(gsm8k: Path, out: Path) -> None:
    """The mixture, its parts, its held-out rows and the target's, the same each time."""
    if (out / "train.jsonl").exists():
        return
    chance = random.Random(0)
    train, test = (_read(gsm8k / f"{name}.jsonl") for name in ("train", "test"))
    chance.shuffle(train)
    own, target, spoilt, others = (
        train[:WANTED_ROWS],
        train[WANTED_ROWS : WANTED_ROWS + TARGET],
        train[2_000 : 2_000 + NOISE],
        train[3_000 : 3_000 + NOISE],
    )
    noise = [
        {
            "prompt": row["prompt"],
            "completion": " ".join(chance.sample(words := other["completion"].split(), len(words))),
        }
        for row, other in zip(spoilt, others, strict=True)
    ]
    tales = _read(Path(starter.resolve("starter/fairytaleqa_train.jsonl")))
    for name, rows in {"sums": own, "tales": tales, "noise": noise}.items():
        standing.write_rows(rows, out / f"{name}.jsonl")
    mixture = [*own, *tales, *noise]
    chance.shuffle(mixture)
    standing.write_rows(target, out / "target.jsonl")
    standing.write_rows(chance.sample(test, TESTED), out / "held_out.jsonl")
    standing.write_rows(mixture, out / "train.jsonl")


def _read(path: Path) -> list[dict[str, Any]]:
    """Rows as prompts and completions."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        {"prompt": "\n".join(row[key] for key in ("context", "question") if key in row), "completion": row["answer"]}
        for row in rows
    ]


def _name(arm: str, seed: int) -> str:
    return f"{arm.replace(' ', '-')}/seed-{seed}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gsm8k", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/data_methods"))
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
