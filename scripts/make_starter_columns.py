"""Make the questions with columns that ship in workbench/data/starter from FairytaleQA.

    python scripts/make_starter_columns.py FOLDER      # holds fairytaleqa_qa.jsonl and fairytaleqa_stories.jsonl

Does the story say the answer (`explicit`), or must a reader infer it (`implicit`)? Beside the question and its answer
stand categories (type, scope) and numbers: the story's section, the words of the passage, and the share of the answer's
words that the passage has. Rows of the test file are of other stories, from the data set's test split.
FairytaleQA: Xu et al. 2022, Apache-2.0.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pandas as pd

ROWS = {"train": 1500, "test": 500}
COLUMNS = ["question", "answer", "type", "scope", "section", "words", "found", "story", "label"]


def main(folder: Path) -> None:
    stories = pd.read_json(folder / "fairytaleqa_stories.jsonl", lines=True).set_index("story")["sections"]
    asked = pd.read_json(folder / "fairytaleqa_qa.jsonl", lines=True)
    passages = [[_words(stories[row.story][part]) for part in row.sections] for row in asked.itertuples()]
    answers = [set(_words(each[0])) for each in asked.answers]
    asked = asked.assign(
        answer=asked.answers.str[0],
        section=asked.sections.str[0].astype(int),
        words=[sum(map(len, passage)) for passage in passages],
        found=[
            round(len(answer & set().union(*passage)) / max(1, len(answer)), 2)
            for answer, passage in zip(answers, passages, strict=True)
        ],
        label=asked.explicit,
    )
    out = Path(__file__).parent.parent / "workbench" / "data" / "starter"
    for split, rows in ROWS.items():
        part = asked[asked.split == split].drop_duplicates("question").sample(rows, random_state=0)
        part[COLUMNS].to_csv(out / f"stories_{split}.csv", index=False, lineterminator="\n")


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
