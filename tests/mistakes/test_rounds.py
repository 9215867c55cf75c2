"""Mistakes with section `rounds` end in status 2 and a message that names the setting and the cure, before training."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mistakes.cases import Case, assert_refused, lines, refusal

BARE = "check my.yaml recipe=rounds of=prefer data.held_out=0.2"
SCORED = f"{BARE} rounds.score='[{{kind: number}}]'"
NO_NUMBER = lines([{"question": f"Why {n}?", "answer": "So."} for n in range(12)], "rows.jsonl")
CASES = {
    "nothing judges": Case(BARE, "rounds.score", "Write rounds.score="),
    "beside another recipe": Case("check my.yaml rounds.n=3", "rounds is for recipe=rounds", "Leave rounds out"),
    "a task that learns no answers": Case(f"{BARE} of=classify", "does not take of=classify", "Write of=prefer|sft"),
    "single answers for pairs": Case(f"{SCORED} rounds.to=best", "rounds.to: of=prefer learns pairs", "or auto"),
    "pairs for single answers": Case(f"{SCORED} of=sft rounds.to=pairs", "of=sft learns best or accepted", "or auto"),
    "accepted without a least": Case(f"{SCORED} of=sft rounds.to=accepted", "rounds.to: accepted keeps", "least=1"),
    "a margin of single answers": Case(
        f"{SCORED} of=sft rounds.margin=1", "rounds.margin: is for pairs", "Leave it out"
    ),
    "one answer": Case(f"{SCORED} rounds.n=1", "rounds.n", "greater than or equal to 2"),
    "no rounds": Case(f"{SCORED} rounds.count=0", "rounds.count", "greater than 0"),
    "a key that is none": Case(f"{SCORED} rounds.counts=2", "rounds.counts", "Did you mean `count`"),
    "a kind that is none": Case(f"{BARE} rounds.score='[{{kind: numbr}}]'", "rounds.score", "Did you mean"),
    "a judge without a model": Case(
        f"{BARE} rounds.score='[{{kind: judge, url: \"http://localhost:1/v1\"}}]'", "rounds.score", "model"
    ),
    "a judge that is no address": Case(
        f"{BARE} rounds.score='[{{kind: judge, url: here, model: x}}]'", "'here'", "http://localhost:8000/v1"
    ),
    "all weights": Case(
        f"{SCORED} adapter='{{method: full}}'", "adapter.method: full has no adapter", "rounds.count=1"
    ),
    "two starts": Case(
        f"{SCORED} rounds.warm_up=rows.jsonl prefer.start=one", "rounds.warm_up: and prefer.start both", "Leave one"
    ),
    "test rows": Case(f"{SCORED} data.test=rows.jsonl", "data.test: a round asks the prompts", "leave it out"),
    "sources": Case(
        f"{SCORED} data.train= data.sources='{{a: {{path: rows.jsonl}}, b: {{path: b.jsonl}}}}'",
        "data.sources",
        "data.train=FILE",
    ),
    "an order of rows": Case(f"{SCORED} data.curriculum.by=length", "data.curriculum: is for rows", "Leave it out"),
    "cleaning": Case(f"{SCORED} data.clean=[refusal]", "data.clean", "Leave it out"),
    "the clock": Case(f"{SCORED} budget.time=1h", "budget: rounds cannot end in time", "of each round"),
    "services": Case(f"{SCORED} trackers=[wandb]", "trackers: rounds send nothing", "Leave it out"),
    "a method that changes the backbone": Case(
        f"{SCORED} adapter.method=pissa", "adapter.method=pissa", "rounds.count=1"
    ),
    "a row without a number": Case(SCORED, "rows.jsonl, row", "holds no number", NO_NUMBER),
    "a column that is not there": Case(
        f"{BARE} rounds.score='[{{kind: number, answer: right}}]'", "no column `right`", "rows.jsonl, row"
    ),
    "a plan": Case(f"plan {SCORED.removeprefix('check ')}", "what a round learns is not written yet", "recipe=prefer"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_message_says_where_and_what_to_write(
    case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if case.command.startswith("check ") and (told := refusal(case.command.removeprefix("check "))):
        assert case.place in told and case.cure in told, told
    else:
        assert_refused(case, folder, monkeypatch, capsys)
