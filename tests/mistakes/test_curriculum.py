"""Mistakes with `data.curriculum` end in status 2 and a message with place and cure, before training."""

from __future__ import annotations

import pytest

from tests.mistakes.cases import AssertRefused, Case, file, lines

PLACE = "data.curriculum"
ON = f"{PLACE}.by=length"
CHECK = "check my.yaml"
JUDGE = f"{CHECK} {PLACE}.by=function {PLACE}.function="
COLUMN = f"{PLACE}.by=column {PLACE}.column"
DEF = "def difficulty(row):"
FAILS = file("fails.py", f"{DEF}\n    return 1 / 0\n")
OVER = "'{train.learning_rate: [1.0e-4, 1.0e-3]}'"
TEXTS = lines(
    [{"text": f"The {name} said {n}.", "label": name} for n in range(3, 8) for name in ("cat", "dog")], "t.jsonl"
)
CASES = {
    "settings of none": Case(f"{CHECK} {PLACE}.start=0.2", "by=none orders nothing", f"Write {ON}"),
    "stages of a root": Case(f"{CHECK} {ON} {PLACE}.stages=3", "stages are for pace=step", "curriculum.pace=step"),
    "all open": Case(f"{CHECK} {ON} {PLACE}.start=1", "opens all rows at once", f"{PLACE}.start=0.1"),
    "in percent": Case(f"{CHECK} {ON} {PLACE}.start=10", f"{PLACE}.start", "1"),
    "no such difficulty": Case(f"{CHECK} {PLACE}.by=size", f"{PLACE}.by", "'length'"),
    "no such key": Case(f"{CHECK} {PLACE}.pacing=root", "pacing: unknown key", "pace"),
    "budget alone": Case(
        f"{CHECK} {ON} train.epochs=null train.steps=null budget.tokens=1000",
        "budget alone ends the run",
        "train.epochs",
    ),
    "pictures": Case(f"{CHECK} {ON} recipe=classify data.format=image", "equally long", f"leave {PLACE} out"),
    "a column without a name": Case(f"{CHECK} {PLACE}.by=column", "by=column needs its name", f"{PLACE}.column=NAME"),
    "a column of tokens": Case(f"{CHECK} {ON} {PLACE}.column=n", "column is for by=column", "Leave column out"),
    "no such column": Case(
        f"{CHECK} {PLACE}.by=column {PLACE}.column=qestion", "no `qestion`", "Did you mean `question`"
    ),
    "a column of words": Case(
        f"{CHECK} {PLACE}.by=column {PLACE}.column=question", "rows.jsonl, row 2", "Write a number"
    ),
    "a column of words, run": Case(
        f"run my.yaml {PLACE}.by=column {PLACE}.column=question --out two", "`question` is to say", "Write a number"
    ),
    "a column of names, labelled": Case(
        f"{CHECK} recipe=classify data.train=t.jsonl data.held_out=0.2 {COLUMN}=label",
        "t.jsonl, row",
        "Write a number",
        TEXTS,
    ),
    "a function without a file": Case(
        f"{CHECK} {PLACE}.by=function", "by=function needs its name", f"{PLACE}.function=my_difficulty.py"
    ),
    "no such file": Case(f"{JUDGE}my.py", "my.py is no Python file", "Write the path of one"),
    "no such function": Case(
        f"{JUDGE}my.py", "my.py defines no function difficulty", "Write `def difficulty", file("my.py", "x = 1\n")
    ),
    "a function that fails": Case(
        f"{JUDGE}fails.py",
        "line 2: ZeroDivisionError",
        "Correct the file",
        FAILS,
    ),
    "a function without a number": Case(
        f"{JUDGE}none.py", "returned null", "Return a number", file("none.py", f"{DEF}\n    return None\n")
    ),
    "perplexity of classes": Case(
        f"{CHECK} recipe=classify {PLACE}.by=perplexity",
        "which is for recipe=sft",
        f"Write {PLACE}.by=loss, length, column",
    ),
    "loss of answers": Case(f"{CHECK} {PLACE}.by=loss", "which is for recipe=classify", f"Write {PLACE}.by=perplexity"),
    "loss of folds": Case(
        f"{CHECK} recipe=crossval of=classify {PLACE}.by=loss data.train=t.jsonl",
        "not for recipe=crossval",
        f"Write {ON}",
        TEXTS,
    ),
    "loss of several classes": Case(
        f"{CHECK} recipe=classify classes.kind=several {PLACE}.by=loss", "one class a row", "function or self_paced"
    ),
    "loss in a sweep": Case(
        f"{CHECK} recipe=sweep of=classify sweep.over={OVER} {PLACE}.by=loss",
        "a sweep has several",
        "curriculum.by=length",
    ),
    "loss in shares": Case(
        f"{CHECK} recipe=classify {PLACE}.by=loss distributed.zero=3", "distributed cuts it", "Write distributed.zero=0"
    ),
    "perplexity in a sweep": Case(
        f"{CHECK} recipe=sweep sweep.over={OVER} {PLACE}.by=perplexity", "a sweep has several", "curriculum.by=length"
    ),
    "a sweep at its own pace": Case(
        f"{CHECK} recipe=sweep sweep.over={OVER} {PLACE}.by=self_paced", "a sweep has several", "curriculum.by=length"
    ),
    "a student at its own pace": Case(
        f"{CHECK} recipe=distill distill.teacher.id=backbone {PLACE}.by=self_paced",
        "a distillation has several",
        "curriculum.by=length",
    ),
    "a backbone in shares": Case(
        f"{CHECK} {PLACE}.by=perplexity distributed.zero=3", "distributed cuts it", "Write distributed.zero=0"
    ),
    "one pass at its own pace": Case(
        f"{CHECK} {PLACE}.by=self_paced", "the run ends with it", "Write more train.epochs"
    ),
    "noise of even batches": Case(
        f"{CHECK} {PLACE}.by=self_paced optimizer.noise_scale=5", "rows that are drawn evenly", "Leave it out"
    ),
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
        "number of tokens (8), so that none is easier",
        "Leave",
        TEXTS,
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_message_says_where_and_what_to_write(case: Case, assert_refused: AssertRefused) -> None:
    assert_refused(case)
