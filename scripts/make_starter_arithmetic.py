"""Write the rows of `starter/arithmetic_*.jsonl`: sums of two small numbers, asked for in several ways.

    python scripts/make_starter_arithmetic.py workbench/data/starter

A pair of numbers that is held out in one form of words is among the training rows in another.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

LARGEST = 3
"""Summands are 0 to this."""
FORMS = (
    "What is {} + {}?",
    "Add {} and {}.",
    "{} plus {} is",
    "{} + {} =",
    "How much is {} and {}?",
    "The sum of {} and {} is",
    "I have {} and get {} more.",
    "Count {} and {} together.",
)
HELD_OUT = 0.2


def rows() -> list[dict[str, str]]:
    """All rows, in an order that depends on nothing."""
    numbers = range(LARGEST + 1)
    found = [
        {"prompt": form.format(one, other), "answer": str(one + other)}
        for form in FORMS
        for one in numbers
        for other in numbers
    ]
    random.Random(0).shuffle(found)
    return found


def main(folder: Path) -> None:
    found = rows()
    count = round(HELD_OUT * len(found))
    held_out, train = found[:count], found[count:]
    start = [{"prompt": row["prompt"], "completion": f" {row['answer']}"} for row in train]
    for name, part in {"held_out": held_out, "train": train, "start": start}.items():
        lines = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"arithmetic_{name}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
