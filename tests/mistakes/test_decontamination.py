"""Mistakes with `data.decontaminate` end in status 2 and a message with place and cure, before training."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mistakes.cases import AssertRefused, Case, lines

PLACE = "data.decontaminate"
LEAK = "What do you call a young cat that lives in the old barn by the river?"
OTHER = lines([{"question": LEAK, "answer": "A barn kitten."}], "other.jsonl")
ALL = lines([{"question": LEAK.upper() + f" {n}", "answer": "Kitty."} for n in range(3)], "rows.jsonl")
TEXTS = lines(
    [{"text": f"The {name} said {n}.", "label": name} for n in range(9) for name in ("cat", "dog")], "t.jsonl"
)


def both(folder: Path) -> None:
    """Every training row holds the question of other.jsonl."""
    OTHER(folder)
    ALL(folder)


CHECK = "check my.yaml"
AGAINST = f"{PLACE}.against=[other.jsonl]"
LABELLED = "recipe=crossval of=classify data.train=t.jsonl data.held_out=0.2"
CASES = {
    "off with files": Case(
        f"{CHECK} {AGAINST}", "against is compared by no one", "Write data.decontaminate.action=drop", OTHER
    ),
    "no such file": Case(
        f"{CHECK} {PLACE}.action=keep {PLACE}.against=[othr.jsonl]", "othr.jsonl: no such file", "other.jsonl", OTHER
    ),
    "twice": Case(f"{CHECK} {PLACE}.against=[a,a]", "against names a twice", "Name it once"),
    "itself": Case(
        f"{CHECK} {PLACE}.action=drop {PLACE}.against=[rows.jsonl]", "names the training file", "Name evaluation files"
    ),
    "refused": Case(
        f"{CHECK} {PLACE}.action=refuse {AGAINST} data.held_out=other.jsonl",
        "rows.jsonl: 3 of 3 training rows hold the text",
        "Write data.decontaminate.action=drop",
        both,
    ),
    "nothing left": Case(
        f"{CHECK} {PLACE}.action=drop data.held_out=other.jsonl", "nothing is left to train on", "Give other rows", both
    ),
    "no such action": Case(f"{CHECK} {PLACE}.action=delete", f"{PLACE}.action", "'drop'"),
    "share in percent": Case(f"{CHECK} {PLACE}.share=50", f"{PLACE}.share", "1"),
    "n-grams of one word": Case(f"{CHECK} {PLACE}.ngram=1", f"{PLACE}.ngram", "3"),
    "no such key": Case(f"{CHECK} {PLACE}.n_gram=8", "n_gram: unknown key", "ngram"),
    "nothing to compare": Case(
        f"{CHECK} {LABELLED} {PLACE}.action=drop", "has nothing to compare", f"{PLACE}.against", TEXTS
    ),
    "pictures": Case(
        f"{CHECK} recipe=classify data.format=image {PLACE}.action=drop", "compares words", f"Leave {PLACE} out"
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_message_says_where_and_what_to_write(case: Case, assert_refused: AssertRefused) -> None:
    assert_refused(case)
