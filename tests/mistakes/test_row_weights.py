"""Mistakes with the weights of rows end in status 2 and a message with place and cure, before training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.mistakes.cases import AssertRefused, Case, Prepare, file, lines

WEIGHT = "'data.columns={weight: w}'"
CHECK = f"check my.yaml {WEIGHT}"


def rows(*weights: Any) -> Prepare:
    """Rows of which the first have these weights, and the others 1."""
    every = [*weights, *[1] * (12 - len(weights))]
    return lines([{"question": f"{n}?", "answer": f"{n}.", "w": each} for n, each in enumerate(every)], "rows.jsonl")


def only(name: str) -> Prepare:
    """Rows with the column `w`, and others without it."""

    def prepare(folder: Path) -> None:
        rows(2)(folder)
        lines([{"question": "Why?", "answer": "So."}], name)(folder)

    return prepare


CSV = file("rows.csv", "question,answer,w\n" + "".join(f"{n}?,{n}.,{'' if n == 4 else 1}\n" for n in range(12)))
CASES = {
    "negative": Case(CHECK, "row 1: `w` must be a number from 1e-06 to 1e+06, found -1", "Leave out rows", rows(-1)),
    "zero": Case(CHECK, "row 2: `w` must be a number", "Leave out rows that are not to count", rows(1, 0)),
    "not a number": Case(CHECK, "row 1: `w` must be a number", "found nan", rows(float("nan"))),
    "a word": Case(CHECK, "row 1: `w` must be a number", "found 'high'", rows("high")),
    "true": Case(CHECK, "row 1: `w` must be a number", "found True", rows(True)),
    "null": Case(CHECK, "row 3: `w` must be a number", "found null", rows(1, 2, None)),
    "too large": Case(CHECK, "row 1: `w` must be a number", "1e+06", rows(1e9)),
    "several": Case(CHECK, "2 malformed rows", "data.on_bad_row=skip", rows(-1, -2)),
    "an empty cell": Case(f"{CHECK} data.train=rows.csv", "row 5 (line 6): `w` must be", "found ''", CSV),
    "no such column": Case(
        "check my.yaml 'data.columns={weight: weihgt}'",
        "rows.jsonl has no column `weihgt`",
        "Did you mean `weight`?",
        lines([{"question": "a", "answer": "b", "weight": 1}], "rows.jsonl"),
    ),
    "on a run": Case(f"run my.yaml {WEIGHT}", "row 1: `w` must be a number", "Leave out rows", rows(-1)),
    "of another name": Case(
        "check my.yaml 'data.columns={weights: w}'", "`weights` is no column of any format", "Did you mean `weight`?"
    ),
    "a student of tokens": Case(
        f"{CHECK} recipe=distill distill.teacher.id=backbone",
        "data.columns.weight: a divergence from a teacher counts each token once",
        "of=classify weighs rows",
    ),
    "the key of before": Case(
        f"{CHECK} recipe=classify classes.row_weight=w", "classes.row_weight: unknown key", "classes"
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_message_says_where_and_what_to_write(case: Case, assert_refused: AssertRefused) -> None:
    assert_refused(case)


def test_held_out_rows_need_no_weight(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from workbench.recipes.load import load
    from workbench.recipes.verbs.check import check

    only("held.jsonl")(folder)
    found = check(load("my.yaml", ["data.held_out=held.jsonl", "data.columns={weight: w}"]))
    assert any("1 to 2 times" in note for note in found.notes)
