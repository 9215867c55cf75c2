"""Mistakes with `data.streaming` end in status 2 and a message with place and cure, before training."""

from __future__ import annotations

import pytest

from tests.mistakes.cases import AssertRefused, Case, file, lines

ON = "data.streaming.on=true"
CHECK = f"check my.yaml {ON}"
TABLE = file("rows.csv", "question,answer\nWho?,Nobody.\n")
EMPTY = file("empty.jsonl", "\n")
MORE = lines([{"question": "Who?", "answer": "Nobody."}], "more.jsonl")
LABELS = lines([{"text": f"The {name} {n}.", "label": name} for n in range(9) for name in ("cat", "dog")], "t.jsonl")
CASES = {
    "no number of rows": Case(
        f"{CHECK} train.steps=null", "reads as many rows as the run draws", "write train.steps, or data.limit=ROWS"
    ),
    "epochs of a stream": Case(f"{CHECK} train.steps=null train.epochs=2", "as many rows as", "train.steps"),
    "tokens of a stream": Case(f"{CHECK} train.steps=null budget.tokens=9999", "as many rows as", "data.limit=ROWS"),
    "a share of a file": Case(
        "check my.yaml data.streaming.share=0.5", "share is for streaming.on=true", "data.select.by=random"
    ),
    "no row": Case(f"{CHECK} data.streaming.share=0", "data.streaming.share", "greater than 0"),
    "in percent": Case(f"{CHECK} data.streaming.share=50", "data.streaming.share", "1"),
    "a buffer": Case(f"{CHECK} data.streaming.buffer=1000", "buffer: unknown key", "data.streaming"),
    "only true or false": Case(
        "check my.yaml data.streaming=hub", "data.streaming: expected keys", "data.streaming.on"
    ),
    "folds of a stream": Case(
        f"{CHECK} recipe=crossval of=classify data.train=t.jsonl data.held_out=0.05 evaluate.answers=64",
        "recipe=crossval folds all of them",
        "data.limit=ROWS",
        LABELS,
    ),
    "a choice among what is drawn": Case(
        f"{CHECK} data.select.by=random data.select.rows=9", "among more rows than the run draws", "data.limit=ROWS"
    ),
    "sources without an end": Case(
        f"{CHECK} data.train=null data.sources.a.path=rows.jsonl data.sources.b.path=more.jsonl data.sources.a.limit=9",
        "reads a part of each source",
        "data.sources.b.limit=ROWS",
        MORE,
    ),
    "pictures": Case(
        f"{CHECK} recipe=classify data.format=image evaluate.answers=64",
        "rows of text, and data.format=image none",
        "Leave",
    ),
    "a table": Case(
        f"{CHECK} data.train=rows.csv", "reads jsonl, parquet and txt files and hub data sets", "data.limit", TABLE
    ),
    "nothing in it": Case(f"{CHECK} data.train=empty.jsonl", "streaming gave no row", "other rows", EMPTY),
    "no such file": Case(f"{CHECK} data.train=row.jsonl", "row.jsonl: no such file", "Did you mean `rows.jsonl`?"),
    "offline": Case(f"{CHECK} data.train=nobody/nothing", "nobody/nothing: not cached here", "HF_HUB_OFFLINE is set"),
    "a run": Case(f"run my.yaml {ON} data.train=rows.csv", "data.streaming reads jsonl", "data.limit", TABLE),
    "a plan": Case(f"plan my.yaml {ON} data.train=rows.csv", "data.streaming reads jsonl", "data.limit", TABLE),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_message_says_where_and_what_to_write(case: Case, assert_refused: AssertRefused) -> None:
    assert_refused(case)
