"""Make the FairytaleQA subset that ships in workbench/data/starter from the data set's own files.

    python scripts/make_starter_data.py FOLDER      # holds fairytaleqa_qa.jsonl and fairytaleqa_stories.jsonl

Held-out rows are of other stories than the training rows: the data set's own validation split.
FairytaleQA: Xu et al. 2022, Apache-2.0.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

LONGEST_PASSAGE = 160  # words; keeps the quickstart's rows under about 300 tokens
COUNTS = {"train": ("fairytaleqa_train.jsonl", 2000), "val": ("fairytaleqa_held_out.jsonl", 200)}


def main(folder: Path) -> None:
    stories = {row["story"]: row["sections"] for row in _rows(folder / "fairytaleqa_stories.jsonl")}
    questions = _rows(folder / "fairytaleqa_qa.jsonl")
    out = Path(__file__).parent.parent / "workbench" / "data" / "starter"
    for split, (name, count) in COUNTS.items():
        rows = []
        for question in (row for row in questions if row["split"] == split):
            passage = " ".join(stories[question["story"]][section] for section in question["sections"])
            if len(passage.split()) <= LONGEST_PASSAGE:
                rows.append({"context": passage, "question": question["question"], "answer": question["answers"][0]})
        chosen = random.Random(0).sample(rows, count)
        (out / name).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in chosen), encoding="utf-8")


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
