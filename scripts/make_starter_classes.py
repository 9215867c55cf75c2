"""Make the Banking77 subset that ships in workbench/data/starter from the data set's own files.

    python scripts/make_starter_classes.py FOLDER      # holds train.csv and test.csv, columns text and category

Twenty intents; held-out rows come from the data set's test split, unlabelled ones from what is left of the other. No
text stands twice, but for case and punctuation.
Banking77: Casanueva et al. 2020, CC BY 4.0.
"""

from __future__ import annotations

import csv
import random
import re
import sys
from pathlib import Path

INTENTS = 20
FILES = {
    "test": {"banking77_held_out.csv": slice(20)},
    "train": {"banking77_train.csv": slice(80), "banking77_unlabelled.csv": slice(80, 140)},
}
"""Split of the data set: files, and which rows of each intent. Test comes first: train leaves out what it holds."""


def main(folder: Path) -> None:
    tables = {split: _rows(folder / f"{split}.csv") for split in FILES}
    intents = sorted(random.Random(0).sample(sorted({label for _, label in tables["train"]}), INTENTS))
    seen: set[str] = set()
    for split, names in FILES.items():
        own = [_distinct(tables[split], intent, seen, random.Random(0)) for intent in intents]
        for name, part in names.items():
            chosen = [row for rows in own for row in rows[part]]
            random.Random(0).shuffle(chosen)
            columns = 1 if "unlabelled" in name else 2
            out = Path(__file__).parent.parent / "workbench" / "data" / "starter" / name
            with out.open("w", encoding="utf-8", newline="") as file:
                rows = [("text", "label"), *chosen]
                csv.writer(file, lineterminator="\n").writerows(row[:columns] for row in rows)


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
