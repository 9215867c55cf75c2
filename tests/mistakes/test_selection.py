"""Mistakes with `data.select` end in status 2 and a message with place and cure, before training."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mistakes.cases import Case, assert_refused, lines

PLACE = "data.select"
CHECK = "check my.yaml"
RANDOM, LIKE = f"{PLACE}.by=random", f"{PLACE}.by=importance"
ROWS = lines([{"question": f"How much is {n} and {n}?", "answer": f"{2 * n}."} for n in range(40)], "rows.jsonl")
OTHER = lines([{"question": "How much is a and b?", "answer": "c."}], "other.jsonl")
SILENT = lines([{"text": " "}], "silent.jsonl")
TEXTS = lines(
    [{"text": f"The {name} said {n}.", "label": name} for n in range(4, 8) for name in ("cat", "dog", "emu")], "t.jsonl"
)


def with_other(folder: Path) -> None:
    ROWS(folder)
    OTHER(folder)


def with_silence(folder: Path) -> None:
    ROWS(folder)
    SILENT(folder)


CASES = {
    "no choice": Case(f"{CHECK} {PLACE}.rows=10", "by=all keeps them all", f"Write {RANDOM}"),
    "no budget": Case(f"{CHECK} {RANDOM}", "needs one budget", f"{PLACE}.rows=0.5"),
    "two budgets": Case(f"{CHECK} {RANDOM} {PLACE}.rows=3 {PLACE}.tokens=99", "needs one budget", f"{PLACE}.rows=0.5"),
    "no target": Case(f"{CHECK} {LIKE} {PLACE}.rows=3", "needs rows to resemble", f"{PLACE}.target=FILE"),
    "target at random": Case(
        f"{CHECK} {RANDOM} {PLACE}.rows=3 {PLACE}.target=other.jsonl", "target is for by=importance", "Leave target out"
    ),
    "no such file": Case(
        f"{CHECK} {LIKE} {PLACE}.rows=3 {PLACE}.target=othr.jsonl",
        "othr.jsonl: no such file",
        "other.jsonl",
        with_other,
    ),
    "scored": Case(
        f"{CHECK} {LIKE} {PLACE}.rows=3 {PLACE}.target=other.jsonl data.held_out=other.jsonl",
        "target=other.jsonl is scored too",
        "Name other rows",
        with_other,
    ),
    "more than there are": Case(f"{CHECK} {RANDOM} {PLACE}.rows=4000", "nothing is chosen", "Write a smaller", ROWS),
    "less than a row": Case(f"{CHECK} {RANDOM} {PLACE}.tokens=2", "keeps no row", "Write a larger budget", ROWS),
    "in percent": Case(f"{CHECK} {RANDOM} {PLACE}.rows=0", f"{PLACE}.rows", "0"),
    "nothing said": Case(
        f"{CHECK} {LIKE} {PLACE}.rows=3 {PLACE}.target=silent.jsonl", "silent.jsonl", "text", with_silence
    ),
    "folds": Case(f"{CHECK} recipe=crossval {RANDOM} {PLACE}.rows=3", "scores every row", f"Leave {PLACE} out"),
    "pictures": Case(
        f"{CHECK} recipe=classify data.format=image {LIKE} {PLACE}.rows=3 {PLACE}.target=x",
        "compares words",
        f"Write {RANDOM}",
    ),
    "a class is lost": Case(
        f"{CHECK} recipe=classify data.train=t.jsonl data.held_out=0.3 {RANDOM} {PLACE}.rows=2",
        "no training row of the class",
        "Keep more rows",
        TEXTS,
    ),
    "no such key": Case(f"{CHECK} {PLACE}.row=8", "row: unknown key", "rows"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_message_says_where_and_what_to_write(
    case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(case, folder, monkeypatch, capsys)
