"""Mistakes with labelled rows end in status 2 and a message with place and cure, before a weight is read."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.mistakes.cases import AssertRowsRefused, RowsCase

RECIPE = """
recipe: classify
model: {id: stories, weights: float32}
adapter: {method: lora, rank: 2}
data: {train: rows.jsonl, held_out: 0.2, max_tokens: 64}
batch: {size: 4}
train: {steps: 2}
evaluate: {every: null}
"""
ROWS = [{"text": f"The {name} said {n}.", "label": name} for n in range(10) for name in ("cat", "dog")]
PAIRS = [{"prompt": f"a{n}", "response_a": "b", "response_b": "c", "winner": "ab"[n % 2]} for n in range(20)]
NUMBERS = [{"text": f"It is {n}.", "label": n / 2} for n in range(20)]


Case = partial(RowsCase, rows=ROWS)


def first(**columns: Any) -> list[dict[str, Any]]:
    """ROWS with other values in the first row; None removes a column."""
    return [{name: value for name, value in (ROWS[0] | columns).items() if value is not None}, *ROWS[1:]]


CASES = {
    # Labels.
    "one class": Case("every label is `cat`", "Give rows of another class", rows=ROWS[::2]),
    "no label": Case("rows.jsonl, row 1: `label` is empty", "Move unlabelled rows to a file", rows=first(label="")),
    "null label": Case("row 1: `label` is empty", "data.on_bad_row=skip", rows=[{"text": "a", "label": None}, *ROWS]),
    "no label column": Case(
        "rows.jsonl: has no column `label` among its columns `text`, `category`",
        "Write data.columns='{label: NAME}'",
        rows=[{"text": row["text"], "category": row["label"]} for row in ROWS],
    ),
    "no such label column": Case("has no column `lable`", "Did you mean `label`?", "'data.columns={label: lable}'"),
    "no such wanted column": Case(
        "`labl` is no column that is read here", "Did you mean `label`?", "'data.columns={labl: label}'"
    ),
    "decimal class": Case("row 1: `label` is 0.5", "write classes.kind=number", rows=first(label=0.5)),
    "list as a class": Case("row 1: `label` is a list", "write classes.kind=several", rows=first(label=["cat"])),
    "object as a class": Case("row 1: `label` must be a string or a number", "Map your classes", rows=first(label={})),
    "text as several": Case("row 1: `label` is the text 'cat'", "classes.separator", "classes.kind=several"),
    "number as several": Case(
        "row 1: `label` must be a list of classes, found 3", "Write [3]", "classes.kind=several", rows=first(label=3)
    ),
    "class as a number": Case(
        "row 1: `label` must be a number, found 'cat'", "classes.kind=one", "classes.kind=number"
    ),
    "numbers all alike": Case(
        "every label is 1", "Give other rows", "classes.kind=number", rows=[{**row, "label": 1} for row in ROWS]
    ),
    "winner": Case(
        "row 1: `winner` must be a, b or tie, found 'c'",
        "Correct them",
        "classes.kind=pair",
        rows=[{**PAIRS[0], "winner": "c"}, *PAIRS],
    ),
    "a pair without a response": Case(
        "row 1: `response_b` is empty",
        "Correct them",
        "classes.kind=pair",
        rows=[{**PAIRS[0], "response_b": " "}, *PAIRS],
    ),
    # Text.
    "empty text": Case("row 1: `text` is empty", "data.on_bad_row=skip", rows=first(text=" ")),
    "text that is none": Case("row 1: `text` must be text, found ['a']", "Correct them", rows=first(text=["a"])),
    "no text column": Case("has no column `text`", "data.columns='{text: NAME}'", rows=[{"label": "a", "b": "c"}]),
    "all fields empty": Case(
        "row 1: `title`, `body` are all empty", "Correct them", "'classes.text={title} {body}'", rows=ROWS
    ),
    "template without a column": Case("classes.text: names no column", "in braces", "classes.text=abc"),
    "template with a brace": Case("classes.text", "Write columns in braces", "'classes.text=\"{a\"'"),
    "template with a format": Case("`{a}` is no plain column name", "Rename it", "'classes.text=\"{a:>3}\"'"),
    "column twice": Case("classes.text: duplicate column a", "Name each column once", "'classes.text=\"{a}{a}\"'"),
    "pair without a column": Case(
        "classes: text must hold {prompt}", "where kind is pair", "classes.kind=pair 'classes.text=\"{prompt}\"'"
    ),
    "shares of other columns": Case("shares must name the columns", "text; found a", "'classes.shares={a: 1}'"),
    "no room": Case(
        "row 1: data.max_tokens=8 leaves no token",
        "shorten classes.text",
        "data.max_tokens=8 'classes.text=abcdefghijklm {text}'",
    ),
    # Splits.
    "rare class": Case(
        "no held-out row has the class `fox`, which has 1 training row(s)",
        "write classes.every_class=false",
        rows=[*ROWS, {"text": "a fox", "label": "fox"}],
    ),
    "copies of a class": Case(
        "no held-out row has the class `fox`, which has 3 training row(s)",
        "more distinct rows",
        rows=[*ROWS, *[{"text": text, "label": "fox"} for text in ("a fox", "A fox!", "a  Fox")]],
    ),
    "class absent from the held-out file": Case(
        "other.jsonl: no held-out row has the class `dog`",
        "classes.every_class=false",
        "data.held_out=other.jsonl",
        other=[{"text": "new", "label": "cat"}],
    ),
    "unknown class": Case(
        "other.jsonl, row 1: no training row has the class `cta`. Did you mean `cat`?",
        "leave the row out",
        "data.held_out=other.jsonl",
        other=[{"text": "new", "label": "cta"}, *({"text": f"new {each}", "label": each} for each in ("cat", "dog"))],
    ),
    "unknown class in test": Case(
        "other.jsonl, row 1: no training row has the class `cow`",
        "give training rows of that class",
        "data.test=other.jsonl",
        other=[{"text": "new", "label": "cow"}],
    ),
    "overlap": Case(
        "rows.jsonl, row 2 equals other.jsonl, row 1 but for case",
        "Write data.overlap=drop",
        "data.held_out=other.jsonl",
        other=[{"text": "THE DOG SAID 0", "label": "dog"}],
    ),
    "overlap of everything": Case(
        "every row is also in other.jsonl", "nothing is left", "data.test=other.jsonl data.overlap=drop", other=ROWS
    ),
    "one row": Case("1 row(s) are too few to hold out", "a file of its own", rows=ROWS[:1]),
    "skipped to nothing": Case(
        "none of its 1 rows can be used",
        "Move unlabelled rows",
        "data.on_bad_row=skip",
        rows=[{"text": "a", "label": ""}],
    ),
    # Losses.
    "two balances": Case(
        "classes: weights and sampling both balance", "Keep one", "classes.weights=balanced classes.sampling=over"
    ),
    "weights of several": Case(
        "weights is for labels that are one class", "Leave it out", "classes.kind=several classes.weights=balanced"
    ),
    "focal numbers": Case(
        "gamma and smoothing are for classes", "Leave them out", "classes.kind=number classes.gamma=2"
    ),
    "separator of one": Case("separator is for kind several", "kind: several", "classes.separator=';'"),
    "smoothing": Case("classes.smoothing: expected less than 1", "found 1", "classes.smoothing=1"),
    "kind": Case("classes.kind: expected 'one', 'several', 'number' or 'pair'", "'two'", "classes.kind=two"),
    "no weight column": Case(
        "data.columns: rows.jsonl has no column `w`", "Known: label, text", "'data.columns={weight: w}'"
    ),
    "weight": Case(
        "row 2: `w` must be a number from 1e-06 to 1e+06, found -1",
        "Leave out rows that are not to count",
        "'data.columns={weight: w}'",
        rows=[{**row, "w": 1 - 2 * (n == 1)} for n, row in enumerate(ROWS)],
    ),
    # What belongs to other recipes, and what this one cannot do.
    "settings of text": Case("recipe=classify reads columns", "leave data.loss_on out", "data.loss_on=all"),
    "new tokens": Case("trains no rows of new tokens", "leave model.new_tokens out", "model.new_tokens=[<a>]"),
    "classes of sft": Case("classes is for recipe=classify", "Leave classes out", "recipe=sft classes.gamma=1"),
    "encoder-decoder": Case("is an encoder-decoder", "Take an encoder or a causal backbone", "model.id=t5"),
    "check": Case("every label is `cat`", "Give rows of another class", rows=ROWS[::2], command="check my.yaml"),
    # Verbs on a finished run.
    "evaluate: unknown class": Case(
        "no training row has the class `cow`",
        "leave the row out",
        "data.test=other.jsonl",
        other=[{"text": "new", "label": "cow"}],
        command="evaluate one",
    ),
    "evaluate: classes": Case(
        "evaluate cannot change classes", "start a new run", "classes.gamma=1", command="evaluate one"
    ),
    "predict: no text": Case(
        "other.jsonl: has no column `text`",
        "data.columns='{text: NAME}'",
        other=[{"a": "b"}],
        command="predict one other.jsonl --out a.csv",
    ),
    "generate": Case(
        "recipe classify trains no model that writes text", "workbench predict", command="generate one Hi"
    ),
    "no classes.json": Case("torn/adapter: classes.json missing", "Restore it", command="evaluate torn"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_mistake_is_told(
    case: RowsCase, tmp_path: Path, encoder_decoder: str, finished: Path, assert_rows_refused: AssertRowsRefused
) -> None:
    if case.command.endswith("torn"):
        _tear(tmp_path, finished)
    assert_rows_refused(case, t5=encoder_decoder, one=finished)


def _tear(folder: Path, run: Path) -> None:
    """A copy of the run, by links, without the meaning of its outputs."""
    (folder / "torn" / "adapter").mkdir(parents=True)
    for path in (*run.glob("*.*"), *(run / "adapter").glob("*")):
        if path.name != "classes.json":
            (folder / "torn" / path.relative_to(run)).symlink_to(path)
