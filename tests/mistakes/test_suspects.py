"""Mistakes with `data.drop_suspects` and `evaluate.dynamics` end in status 2 and a message with place and cure."""

from __future__ import annotations

import pytest

from tests.mistakes.cases import AssertRefused, Case, lines

ROWS = lines([{"text": f"The {name} said {n}.", "label": name} for n in range(9) for name in ("cat", "dog")], "t.jsonl")
RARE = lines(
    [{"text": f"{name} number {n}, {'x' * n}.", "label": name} for n in range(12) for name in ("cat", "dog")]
    + [{"text": f"Whatever a bird says to {who}.", "label": "bird"} for who in ("me", "another animal")],
    "t.jsonl",
)
NUMBERS = lines([{"text": f"The cat said {n}.", "label": n} for n in range(18)], "t.jsonl")
ON = "recipe=crossval of=classify data.train=t.jsonl data.held_out=0.05 data.drop_suspects=true"
LOOSE = "folds.every_class=false duplicates.on_duplicate=ignore"
CASES = {
    "no folds": Case(
        "check my.yaml data.drop_suspects=true", "needs predictions out of fold", "Write recipe=crossval", ROWS
    ),
    "numbers": Case(f"check my.yaml {ON} classes.kind=number", "is for classes.kind one and pair", "Leave it", NUMBERS),
    "two folds": Case(
        f"check my.yaml {ON} {LOOSE} folds.k=2", "leave two folds out, and there are 2", "folds.k=3", ROWS
    ),
    "a rare class": Case(
        f"check my.yaml {ON} {LOOSE} folds.k=3", "class bird has rows in", "or leave data.drop_susp", RARE
    ),
    "several classes": Case(
        f"check my.yaml {ON} classes.kind=several",
        "is for classes.kind one and pair, not several",
        "Leave it out",
        ROWS,
    ),
    "dynamics of another kind": Case("check my.yaml evaluate.dynamics=sometimes", "evaluate.dynamics", "auto"),
    "no such key": Case("check my.yaml data.drop_suspect=true", "drop_suspect: unknown key", "drop_suspects"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_message_says_where_and_what_to_write(case: Case, assert_refused: AssertRefused) -> None:
    assert_refused(case)
