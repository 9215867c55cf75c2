"""Mistakes with judged answers end in status 2 and a message with place and cure, before any training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.mistakes.cases import AssertRefused, Case, Prepare, lines, refusal

PREFER = "my.yaml recipe=prefer data.train=pairs.jsonl"
CHECK = f"check {PREFER}"
RUN = f"run {PREFER}"


def chat(n: int, **changes: Any) -> dict[str, Any]:
    """A pair of answers to a question, of which some columns are others."""
    row: dict[str, Any] = {
        "messages": [{"role": "user", "content": f"What comes after {n}?"}],
        "chosen": {"role": "assistant", "content": f"It is {n + 1}."},
        "rejected": {"role": "assistant", "content": "No idea."},
    }
    row |= changes
    return {name: value for name, value in row.items() if value is not ...}


def pairs(first: dict[str, Any] | None = None, *, count: int = 12, **of_all: Any) -> Prepare:
    """Pairs, the first with other columns than the rest."""
    rows = [chat(n, **of_all, **(first or {} if n == 0 else {})) for n in range(count)]
    return lines(rows, "pairs.jsonl")


def rated(*labels: Any, prompt: str = "Number {}?") -> Prepare:
    """Single answers with these labels, and as many good ones behind them."""
    every = [*labels, *[True] * (12 - len(labels))]
    return lines(
        [{"prompt": prompt.format(n), "completion": f" It is {n}.", "label": label} for n, label in enumerate(every)],
        "pairs.jsonl",
    )


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


TWO_PROMPTS = {
    "messages": ...,
    "chosen": [{"role": "user", "content": "Why?"}, answer("So.")],
    "rejected": [{"role": "user", "content": "How?"}, answer("Thus.")],
}
ONE_TEXT = {"messages": ..., "chosen": "Once upon a time.", "rejected": "Once upon a time."}
NO_SHARED = {"messages": ..., "chosen": "Once upon a time.", "rejected": "There was a man."}
RATED = [[{"role": "user", "content": f"Is it {n}?"}, answer("Yes.")] for n in range(2)]
LONG = answer("It is a very long story about a man and his dog. " * 20)
ONE_END = {"chosen": answer("Once there was a man. " * 30 + "Yes."), "rejected": answer("Once there was a man. " * 30)}
SKIP = "data.on_bad_row=skip"

IN_ROWS = {
    "the same answer": Case(
        CHECK, "row 1: `chosen` and `rejected` are the same answer", SKIP, pairs({"rejected": answer("It is 1.")})
    ),
    "the same but for spaces": Case(
        CHECK, "row 1: `chosen` and `rejected` are the same", SKIP, pairs({"rejected": answer(" It is 1. ")})
    ),
    "an empty answer": Case(
        CHECK,
        "row 1: `rejected` (assistant) has neither content",
        "Remove the message",
        pairs({"rejected": answer("")}),
    ),
    "an empty text": Case(CHECK, "row 1: `rejected` is empty", "row 1", pairs({"rejected": "  "})),
    "nothing rejected": Case(CHECK, "row 1: `rejected` is missing or null", "two answers", pairs({"rejected": None})),
    "nothing chosen": Case(CHECK, "row 1: `chosen`", "null", pairs({"chosen": None})),
    "different prompts": Case(
        CHECK,
        "row 1: `chosen` and `rejected` answer different prompts, from message 1 on",
        "Give both the same turns",
        pairs(TWO_PROMPTS),
    ),
    "the same text": Case(CHECK, "row 1: `chosen` and `rejected` are the same text", SKIP, pairs(None, **ONE_TEXT)),
    "no common prompt": Case(
        CHECK,
        "row 1: `chosen` and `rejected` begin with no common prompt",
        "data.columns='{prompt:",
        pairs(None, **NO_SHARED),
    ),
    "text and messages": Case(
        CHECK,
        "row 1: `chosen` is text and `rejected` a list of messages",
        "Write both alike",
        pairs({"messages": ..., "prompt": "Why?", "chosen": "So."}),
    ),
    "the user answers": Case(
        CHECK,
        "row 1: `chosen` must end with the assistant",
        "not with the tool",
        pairs({"chosen": [{"role": "tool", "content": "4"}]}),
    ),
    "an unknown role": Case(
        CHECK,
        "row 1: `chosen`: unknown role 'asistant'",
        "Did you mean `assistant`?",
        pairs({"chosen": {"role": "asistant", "content": "4"}}),
    ),
    "no difference is left": Case(
        f"{CHECK} data.max_tokens=32 data.truncate=right",
        "removes the difference",
        "data.truncate=left",
        pairs(ONE_END),
    ),
    "no answer is left": Case(
        f"{CHECK} data.max_tokens=8 data.truncate=right", "leaves no answer", "a larger data.max_tokens", pairs()
    ),
    "no room for a prompt": Case(
        f"{CHECK} data.max_tokens=64",
        "leaves no room for a prompt in data.max_tokens=64",
        "data.truncate=right",
        pairs({"chosen": LONG}),
    ),
    "one label is no label": Case(
        f"{CHECK} prefer.loss=kto", "row 1: `label` must be true or false, found 'good'", "found 'good'", rated("good")
    ),
    "labels for pairs": Case(
        CHECK, "it rates one answer (label), where two are compared", "prefer.loss=kto", rated(False)
    ),
    "one label among pairs": Case(
        CHECK,
        "it rates one answer (label)",
        "Give each row chosen and rejected",
        lines([*(chat(n) for n in range(12)), *({"messages": asked, "label": True} for asked in RATED)], "pairs.jsonl"),
    ),
    "one prompt for kto": Case(
        f"{CHECK} prefer.loss=kto data.held_out=held.jsonl",
        "have one prompt",
        "rows of two prompts at least",
        lambda folder: (
            rated(False, prompt="Why?")(folder),
            lines([{"prompt": "How?", "completion": " So.", "label": True}], "held.jsonl")(folder),
        ),
    ),
    "rows without judgement": Case(
        "check my.yaml recipe=prefer", "row 1: data.format question_answer judges no answers", "data.columns='{chosen:"
    ),
    "a rated question": Case(
        f"{CHECK} prefer.loss=kto",
        "row 1: the last message is rated, and it is the user's",
        "not the assistant's",
        lines([{"messages": [{"role": "user", "content": "Why?"}], "label": True}] * 12, "pairs.jsonl"),
    ),
    "a margin in words": Case(
        f"{CHECK} 'data.columns={{margin: m}}'",
        "row 1: `m` must be a finite number, found 'much'",
        "finite number",
        lines([chat(n, m="much") for n in range(12)], "pairs.jsonl"),
    ),
    "a held-out prompt": Case(
        f"{CHECK} data.held_out=held.jsonl",
        "answers the prompt of",
        "data.overlap=drop",
        lambda folder: (pairs()(folder), lines([chat(3, rejected=answer("Never."))], "held.jsonl")(folder)),
    ),
    "the same answer on a run": Case(
        RUN, "row 1: `chosen` and `rejected` are the same answer", SKIP, pairs({"rejected": answer("It is 1.")})
    ),
    "trust of no run": Case(f"{CHECK} prefer.trust=true", "prefer.trust is for", "Leave it out", pairs()),
    "no such start": Case(f"{CHECK} prefer.start=nowhere", "prefer.start", "nowhere", pairs()),
    "no such reference": Case(f"{CHECK} prefer.reference=nowhere", "prefer.reference", "nowhere", pairs()),
}


FEW = ("the same answer", "different prompts", "no difference is left", "one label among pairs", "no such reference")
"""Of each place that refuses, one; the others run with the slow tests."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=[] if name in FEW else [pytest.mark.slow]) for name, case in IN_ROWS.items()],
)
def test_of_rows_and_references(case: Case, assert_refused: AssertRefused) -> None:
    assert_refused(case)


OF_SETTINGS = {
    "prefer.loss=dop": ("prefer.loss", "dpo"),
    "prefer.loss=orpo prefer.reference=backbone": ("compares with no reference", "Leave prefer.reference out"),
    "prefer.loss=simpo prefer.length=mean": ("its own way to count tokens", "Leave prefer.length out"),
    "prefer.loss=kto prefer.length=desensitised": ("compares the lengths of a pair", "Leave it out"),
    "prefer.label_smoothing=0.1": ("prefer.label_smoothing is for prefer.loss=cdpo|robust", "Leave it out"),
    "prefer.loss=robust prefer.label_smoothing=0.5": ("prefer.label_smoothing", "less than 0.5"),
    "prefer.gamma=0.5": ("prefer.gamma is for prefer.loss=simpo", "Leave it out"),
    "prefer.undesirable=2": ("are for prefer.loss=kto", "Leave them out"),
    "prefer.ld_alpha=0.2": ("prefer.ld_alpha is for prefer.length=desensitised", "Write that too"),
    "prefer.beta=0": ("prefer.beta", "greater than 0"),
    "prefer.loss=ipo 'data.columns={margin: m}'": ("data.columns.margin is for prefer.loss=dpo|hinge", "Leave it out"),
    "data.format=messages": ("data.format=messages judges no answers", "leave it out"),
    "data.loss_on=all": ("nothing else carries loss", "leave data.loss_on out"),
    "data.select.by=random data.select.rows=4": ("data.select", "Leave data.select out"),
    "data.curriculum.by=length": ("data.curriculum is for rows of one answer", "Leave data.curriculum out"),
    "data.sampling.by=tilted": ("data.sampling is for rows of one answer", "Leave data.sampling out"),
    "regularise.label_smoothing=0.1": ("regularise.label_smoothing is for recipe=sft|mlm", "Leave it out"),
    "regularise.neftune=5": ("regularise.neftune is for recipe=sft|mlm", "Leave it out"),
    "freeze.policy=static freeze.layers=2 freeze.cache=memory": ("computes two together", "Write freeze.cache=off"),
    "'model.new_tokens=[<x>]'": ("unknown to the reference", "merge that run"),
    "evaluate.dynamics=true": ("evaluate.dynamics", "Leave it out"),
    "adapter.method=full prefer.start=runs/x": ("adapter.method=full has none", "model.id=RUN/adapter"),
    "prefer.loss=kto 'adapter={method: sparse}'": ("looks at the loss of single rows", "Write adapter.by=magnitude"),
    "prefer.loss=kto 'adapter={method: lora-ga}'": ("looks at the loss of single rows", "Write adapter.method=lora."),
    "prefer.loss=kto optimizer.sam=0.05": ("kto's reference point", "Leave it out"),
    "recipe=sft prefer.beta=0.2": ("prefer is for recipe=prefer", "Leave prefer out"),
    "recipe=sft 'data.columns={margin: m}'": ("data.columns.margin is for recipe=prefer", "Leave it out"),
}


@pytest.mark.parametrize("words", OF_SETTINGS)
def test_of_settings(words: str, folder: Path) -> None:
    place, cure = OF_SETTINGS[words]
    told = refusal(f"my.yaml recipe=prefer data.train=pairs.jsonl {words}")
    assert told is not None and place in told and cure in told, told


def test_bad_pairs_can_be_left_out_and_are_counted(folder: Path) -> None:
    from workbench.recipes.load import load
    from workbench.recipes.verbs.check import check

    pairs({"rejected": answer("It is 1.")})(folder)
    found = check(load("my.yaml", ["recipe=prefer", "data.train=pairs.jsonl", SKIP]))
    assert any("Left out" in note and "same answer" in note for note in found.notes)
