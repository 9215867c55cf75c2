"""Mistakes with `data.curriculum` end in status 2 and a message with place and cure, before training."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mistakes.cases import Case, assert_refused, lines

PLACE = "data.curriculum"
ON = f"{PLACE}.by=length"
CHECK = "check my.yaml"
TEXTS = lines(
    [{"text": f"The {name} said {n}.", "label": name} for n in range(3, 8) for name in ("cat", "dog")], "t.jsonl"
)
CASES = {
    "settings of none": Case(f"{CHECK} {PLACE}.start=0.2", "by=none orders nothing", f"Write {ON}"),
    "stages of a root": Case(f"{CHECK} {ON} {PLACE}.stages=3", "stages are for pace=step", "Write pace=step"),
    "all open": Case(f"{CHECK} {ON} {PLACE}.start=1", "opens all rows at once", f"{PLACE}.start=0.1"),
    "in percent": Case(f"{CHECK} {ON} {PLACE}.start=10", f"{PLACE}.start", "1"),
    "no such difficulty": Case(f"{CHECK} {PLACE}.by=size", f"{PLACE}.by", "'length'"),
    "no such key": Case(f"{CHECK} {PLACE}.pacing=root", "pacing: unknown key", "pace"),
    "budget alone": Case(
        f"{CHECK} {ON} train.epochs=null train.steps=null budget.tokens=1000",
        "budget alone ends the run",
        "train.epochs",
    ),
    "pictures": Case(f"{CHECK} {ON} recipe=classify data.format=image", "as many patches", f"Leave {PLACE} out"),
    "two ways of drawing": Case(
        f"{CHECK} {ON} recipe=classify classes.sampling=even",
        "classes.sampling=even does not",
        "classes.weights=balanced",
    ),
    "answers that change": Case(
        f"{CHECK} {ON} recipe=distill distill.teacher.id=backbone distill.on_policy.share=0.5",
        "distill.on_policy replaces answers",
        "Leave one of them out",
    ),
    "one length": Case(
        f"{CHECK} {ON} recipe=classify data.train=t.jsonl data.held_out=0.2",
        "tokens, so that none is easier",
        "Leave",
        TEXTS,
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_message_says_where_and_what_to_write(
    case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(case, folder, monkeypatch, capsys)
