"""Make the Banking77 subset that ships in workbench/starter from the data set's own files.

    python scripts/make_starter_classes.py FOLDER      # holds train.csv and test.csv, columns text and category

Twenty intents; held-out rows come from the data set's test split. No text stands twice, but for case and punctuation.
Banking77: Casanueva et al. 2020, CC BY 4.0.
"""

from __future__ import annotations

import csv
import random
import re
import sys
from pathlib import Path

INTENTS = 20
SPLITS = {"test": ("banking77_held_out.csv", 20), "train": ("banking77_train.csv", 80)}
"""Split of the data set: file, and rows of each intent at most. Test comes first: train leaves out what it holds."""


def main(folder: Path) -> None:
    tables = {split: _rows(folder / f"{split}.csv") for split in SPLITS}
    intents = random.Random(0).sample(sorted({label for _, label in tables["train"]}), INTENTS)
    seen: set[str] = set()
    for split, (name, most) in SPLITS.items():
        chosen = [
            row for intent in sorted(intents) for row in _distinct(tables[split], intent, seen, random.Random(0))[:most]
        ]
        random.Random(0).shuffle(chosen)
        out = Path(__file__).parent.parent / "workbench" / "starter" / name
        with out.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([("text", "label"), *chosen])


def _distinct(rows: list[tuple[str, str]], intent: str, seen: set[str], chance: random.Random) -> list[tuple[str, str]]:
    own = [row for row in rows if row[1] == intent]
    found = []
    for text, label in chance.sample(own, len(own)):
        plain = " ".join(re.findall(r"\w+", text.lower()))
        if plain not in seen:
            seen.add(plain)
            found.append((text, label))
    return found


def _rows(path: Path) -> list[tuple[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return [(" ".join(row["text"].split()), row["category"]) for row in csv.DictReader(file)]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
