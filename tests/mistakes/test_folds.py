"""Mistakes with folds, pseudo-labels and views end in status 2 and a message with place and cure, before training."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.mistakes.cases import assert_refused_with, lines

RECIPE = """
recipe: crossval
model: {id: stories, weights: float32}
adapter: {method: lora, rank: 2}
data: {train: rows.jsonl, max_tokens: 64}
duplicates: {on_duplicate: ignore}
folds: {k: 5}
batch: {size: 4}
train: {steps: 2}
evaluate: {every: null}
"""
ANIMALS = ("cat", "dog")
ROWS = [
    {"text": f"The {name} said {n}.", "label": name, "who": "ab"[n % 2], "part": str(n % 5)}
    for n in range(10)
    for name in ANIMALS
]
OTHERS = [{"text": f"Number {n} is here, {n + 1} is not."} for n in range(6)]


class Case(NamedTuple):
    place: str
    """What the message must name as the place."""
    cure: str
    words: str = ""
    """Overrides."""
    rows: Iterable[Any] = ROWS
    other: Iterable[Any] = OTHERS
    """Rows of other.jsonl."""
    code: str = ""
    """Of code.py."""


def parts(**of: int) -> list[dict[str, Any]]:
    """ROWS in folds by class: those of a class that is named are all in that one."""
    return [{**row, "part": str(of.get(row["label"], row["part"]))} for row in ROWS]


VIEW = "def views(row):\n    return [row]\n"
USER = "'tta={views: [typos, user], function: code.py}'"
MERGE = "'tta={views: [typos], merge: user, function: code.py}'"
CASES = {
    "nested folds of named folds": Case(
        "folds.column says which rows are in which", "Write folds.group=part alone", "folds.nested=3 folds.column=part"
    ),
    "nested folds in time": Case("folds.time says which", "Write data.test=FILE", "folds.nested=3 folds.time=part"),
    "one nested fold": Case("folds.nested", "greater than or equal to 2", "folds.nested=1"),
    "nested folds beside one of them": Case(
        "folds.nested deals the outer folds", "Leave one of them out", "folds.nested=3 data.fold.of=3"
    ),
    "an outer fold by a column": Case(
        "data.fold.group is not read", "Leave it out", "data.fold.of=3 data.fold.group=who"
    ),
    "more nested folds than rows of a class": Case(
        "folds.nested=11: the class `cat` has only 10 row(s)", "folds.nested=10", "folds.nested=11"
    ),
    "nested folds that leave too few rows for folds": Case(
        "folds.k=8: the class", "folds.k=6", "folds.nested=3 folds.k=8"
    ),
    "more folds than rows of a class": Case(
        "folds.k=11: the class `cat` has only 10 row(s)", "folds.k=10", "folds.k=11"
    ),
    "more folds than groups": Case("the 20 rows form only 2 groups", "Write folds.k=2", "folds.group=who"),
    "a stage without a name": Case(
        "no stage is called `views`", "Write calibration, drop_suspects, pseudo_label, tta", "folds.keep=[views]"
    ),
    "a stage that does not run": Case(
        "folds.keep names tta, consensus, which this run does not have", "Leave it out", "'folds.keep=[tta,consensus]'"
    ),
    "near-duplicates": Case(
        "form only", "near-duplicates, which duplicates.on_duplicate=ignore", "duplicates.on_duplicate=together"
    ),
    "no such group": Case("folds.group=whom: no row has such a column", "Did you mean `who`?", "folds.group=whom"),
    "class in one fold": Case(
        "would never train on it", "several folds", "folds.column=part folds.every_class=false", rows=parts(cat=1)
    ),
    "class absent from a fold": Case(
        "the class `cat` is absent from fold",
        "folds.every_class=false",
        "folds.column=part",
        rows=[row for row in ROWS if row["label"] == "dog" or row["part"] != "3"],
    ),
    "several classes in one": Case(
        "the class `animal,cat` has only 2 row(s)",
        "`animal,cat` looks like 2 classes: then write classes.kind=several classes.separator=','.",
        rows=[
            {**row, "label": name}
            for row, name in zip(ROWS, ["animal,cat", "cat,pet", "animal,pet"] * 2 + ["pet"] * 99, strict=False)
        ],
    ),
    "a fold of one": Case("folds.k", "greater than or equal to 2", "folds.k=1"),
    "no label": Case(
        "rows.jsonl, row 1: `label` is empty", "Move unlabelled rows to a file", rows=[{**ROWS[0], "label": ""}, *ROWS]
    ),
    "held-out rows": Case("recipe=crossval validates on folds", "Leave data.held_out out", "data.held_out=0.2"),
    "best step": Case("save.ship=best", "Write save.ship=last", "save.ship=best evaluate.every=1"),
    "folds elsewhere": Case("duplicates is for recipe=crossval", "Leave duplicates out", "recipe=classify"),
    "test rows that train": Case(
        "1 of 19 training rows are also in other.jsonl",
        "data.overlap=drop",
        "duplicates.on_duplicate=together data.test=other.jsonl folds.k=2",
        other=ROWS[:1],
        rows=[*ROWS[:1], *({"text": f"{a} {n} {a} {n * n} {a}", "label": a} for n in range(9) for a in ANIMALS)],
    ),
    "class only in test": Case(
        "other.jsonl, row 1: no training row has the class `cow`",
        "leave the row out",
        "data.test=other.jsonl",
        other=[{"text": "moo", "label": "cow"}],
    ),
    # Pseudo-labels.
    "no such unlabelled file": Case("more.jsonl", "no such file", "pseudo_label.unlabelled=more.jsonl"),
    "pseudo-labels of numbers": Case(
        "pseudo_label is for classes.kind one and pair, not number",
        "Leave pseudo_label.unlabelled out",
        "classes.kind=number pseudo_label.unlabelled=other.jsonl",
    ),
    "known unlabelled rows": Case(
        "other.jsonl: every row is a near-duplicate of one with a label",
        "Give other rows",
        "duplicates.on_duplicate=keep_one folds.k=2 pseudo_label.unlabelled=other.jsonl",
        rows=[{"text": f"{a} {n * 7919} {a} {n * 104729} {a}", "label": a} for n in range(1, 9) for a in ANIMALS],
        other=[{"text": "CAT 7919 cat 104729, cat!"}],
    ),
    "floor above threshold": Case(
        "floor", "Write floor", "'pseudo_label={adaptive: true, threshold: 0.4, floor: 0.5}'"
    ),
    # Correction by similarity.
    "more neighbours than rows": Case(
        "correction.neighbours: a row asks 50 rows of its own fold for their predictions",
        "Write correction.neighbours=",
        "correction.neighbours=[50,80]",
    ),
    "neighbours of several folds": Case(
        "folds.repeats=2 puts a row into several", "Write folds.repeats=1", "correction.neighbours=2 folds.repeats=2"
    ),
    "a correction without neighbours": Case(
        "without neighbours nothing is corrected", "Write neighbours", "correction.strength=0.5"
    ),
    "no such word of a correction": Case("correction.neighbors", "neighbours", "correction.neighbors=5"),
    "a correction elsewhere": Case(
        "correction is for recipe=crossval", "Leave correction out", "recipe=classify correction.neighbours=2"
    ),
    # Views.
    "swap without pairs": Case("tta.views: swap exchanges two responses", "Leave swap out", "tta.views=[swap]"),
    "no such view": Case("tta.views", "typos", "tta.views=[typo]"),
    "useless view": Case("view tail changes none of the 20 rows", "leave tail out of tta.views", "tta.views=[tail]"),
    "a user's view without text": Case(
        "tta.function: views() of code.py, called with rows.jsonl, row 1",
        "Return every column",
        USER,
        code="def views(row):\n    return [{}]\n",
    ),
    "a user's merge of another shape": Case(
        "merge() returned shape", "Return (N, C)", MERGE, code="def merge(p):\n    return p\n"
    ),
    "probabilities that do not sum to one": Case(
        "tta.function: merge() returned",
        "Divide by p.sum(axis=1, keepdims=True)",
        MERGE,
        code="def merge(p):\n    return p.sum(axis=0)\n",
    ),
    "a user's file without views": Case("code.py defines no function views", "def views(row", USER, code="x = 1\n"),
    "a view nobody asked for": Case(
        "defines views(), which is not used",
        "add user to tta.views",
        MERGE,
        code=VIEW + "def merge(p):\n    return p.mean(axis=0)\n",
    ),
}


ALIKE = (
    "more folds than rows of a class",
    "no such group",
    "a fold of one",
    "no label",
    "test rows that train",
    "known unlabelled rows",
    "useless view",
    "a user's file without views",
)
"""Of each place where `check` and `run` refuse, one; the others are made with one verb."""


@pytest.mark.parametrize(("name", "verb"), [*((name, "run") for name in CASES), *((name, "check") for name in ALIKE)])
def test_a_mistake_is_told(
    name: str,
    verb: str,
    tmp_path: Path,
    stories: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    case = CASES[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text(RECIPE)
    (tmp_path / "code.py").write_text(case.code)
    lines(case.rows, "rows.jsonl")(tmp_path)
    lines(case.other, "other.jsonl")(tmp_path)
    (tmp_path / "stories").symlink_to(stories)
    assert_refused_with((case.place, case.cure), f"{verb} my.yaml {case.words}", monkeypatch, capsys)
    assert not list(tmp_path.glob("runs/*/members"))
