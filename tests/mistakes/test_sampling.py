"""Mistakes with `data.sampling` end in status 2 and a message with place and cure, before training."""

from __future__ import annotations

import pytest

from tests.mistakes.cases import AssertRefused, Case

PLACE = "data.sampling"
ON = f"{PLACE}.by=infobatch"
CHECK = "check my.yaml"
CASES = {
    "no such sampler": Case(f"{CHECK} {PLACE}.by=infobath", f"{PLACE}.by", "'infobatch'"),
    "no such key": Case(f"{CHECK} {ON} {PLACE}.ratio=0.5", "ratio: unknown key", PLACE),
    "in percent": Case(f"{CHECK} {ON} {PLACE}.prune=50", f"{PLACE}.prune", "1"),
    "settings of none": Case(f"{CHECK} {PLACE}.prune=0.4", "prune is for by=infobatch", "Leave prune out"),
    "settings of another": Case(f"{CHECK} {ON} {PLACE}.pool=4", "for by=importance|selective", "Leave pool out"),
    "a pool of one": Case(f"{CHECK} {PLACE}.by=selective {PLACE}.pool=1", f"{PLACE}.pool", "2"),
    "until for what never ends": Case(
        f"{CHECK} {PLACE}.by=importance {PLACE}.until=0.5", "until is for by=infobatch|selective", "Leave until out"
    ),
    "a single pass": Case(f"{CHECK} {ON} train.steps=null train.epochs=1", "so never", "Write more train.epochs"),
    "a single pass, run": Case(f"run my.yaml {ON} train.steps=null train.epochs=1", "so never", "train.epochs"),
    "budget alone": Case(
        f"{CHECK} {ON} train.epochs=null train.steps=null budget.tokens=1000",
        "budget alone ends the run",
        "train.epochs",
    ),
    "beside a curriculum": Case(
        f"{CHECK} {ON} data.curriculum.by=length", "both say which rows a step takes", "Leave one of them out"
    ),
    "beside drawn classes": Case(
        f"{CHECK} {ON} recipe=classify classes.sampling=even",
        "both say how often a row comes",
        "classes.weights=balanced",
    ),
    "several sources": Case(
        f"{CHECK} {ON} data.train=null data.sources.a.path=rows.jsonl data.sources.b.path=more.jsonl",
        "data.sources mixes several",
        "Leave one of them out",
    ),
    "a sweep": Case(f"{CHECK} {ON} recipe=sweep", "members of a sweep train on the same rows", "Leave it out"),
    "a student": Case(
        f"{CHECK} {ON} recipe=distill distill.teacher.id=backbone",
        "a distillation measures no losses of rows",
        "Leave it out",
    ),
    "noise of even batches": Case(
        f"{CHECK} {ON} optimizer.noise_scale=5", "rows that are drawn evenly", "Leave it or data.sampling out"
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_message_says_where_and_what_to_write(case: Case, assert_refused: AssertRefused) -> None:
    assert_refused(case)
