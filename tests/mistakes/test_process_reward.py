"""Mistakes with rows whose steps are rated end in status 2 and a message with place and cure."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.mistakes.cases import AssertRowsRefused, RowsCase

RECIPE = """
recipe: reward
reward: {kind: process}
model: {id: stories, weights: float32}
adapter: {method: lora, rank: 2}
data: {train: rows.jsonl, held_out: 0.2, max_tokens: 64}
batch: {size: 4}
train: {steps: 2}
evaluate: {every: null}
"""
ROWS: list[dict[str, Any]] = [
    {"prompt": f"After {n}?\n", "completions": ["It is more.", f"It is {n + 1}."], "labels": [True, n % 2 == 0]}
    for n in range(20)
]
PAIRS = [{"prompt": f"After {n}?", "chosen": f" It is {n + 1}.", "rejected": " No idea."} for n in range(20)]
LONG = {"prompt": "After?\n", "completions": ["It is more. " * 60, "It is 1."], "labels": [True, True]}


def first(**changes: Any) -> list[dict[str, Any]]:
    """The rows, of which the first has other columns."""
    return [{**ROWS[0], **changes}, *ROWS[1:]]


Case = partial(RowsCase, rows=ROWS, other=[{"a": "b"}])

CASES = {
    "pairs": Case("data.format preference rates no steps", "or leave reward.kind out", rows=PAIRS),
    "steps without the kind": Case(
        "data.format stepwise rates the steps", "recipe=reward reward.kind=process", "reward.kind=outcome"
    ),
    "steps for prefer": Case("data.format stepwise rates the steps", "reward.kind=process", "recipe=prefer reward={}"),
    "no step": Case("row 1: `completions` must be a list with at least one step", "found", rows=first(completions=[])),
    "a text for steps": Case(
        "row 1: `completions` must be a list with at least one step, found 'It", "a list", rows=first(completions="It")
    ),
    "a blank step": Case(
        "row 1: `completions`: step 2 must be a text that is not blank", "found ' '", rows=first(completions=["a", " "])
    ),
    "no labels": Case("row 1: `labels` is missing", "true or false for each step", rows=first(labels=None)),
    "too few labels": Case(
        "row 1: `labels` must be a list with one label for each of the 2 steps", "a list of 1", rows=first(labels=[1])
    ),
    "a label beyond 1": Case(
        "row 1: `labels`: that of step 2 must be true, false or a number from 0 to 1",
        "found 3",
        rows=first(labels=[1, 3]),
    ),
    "a label in words": Case(
        "row 1: `labels`: that of step 1 must be", "found 'good'", rows=first(labels=["good", True])
    ),
    "a first step that is cut": Case(
        "row 1: no supervised token is left after cutting to data.max_tokens=64",
        "data.on_bad_row=skip",
        "data.truncate=right",
        rows=[LONG, *ROWS],
    ),
    "steps in one token": Case(
        "row 1: a token reaches from a step into the next one",
        "a line break",
        "reward.separator=l",
        rows=first(completions=["a", "l"]),
    ),
    "centring": Case("reward.centre is for reward.kind=outcome", "Leave it out", "reward.centre=0.5"),
    "aggregate of pairs": Case(
        "reward.aggregate is for reward.kind=process", "Leave it out", "reward.kind=outcome reward.aggregate=mean"
    ),
    "an empty separator": Case("reward.separator", "at least 1 character", "'reward.separator=\"\"'"),
    "another aggregate": Case("reward.aggregate", "'min', 'product', 'mean' or 'last'", "reward.aggregate=max"),
    "another format": Case("data.format=messages rates no steps", "data.format=stepwise", "data.format=messages"),
    "margins": Case("data.columns.margin compares two answers", "Leave it out", "'data.columns={margin: m}'"),
    "predict: no steps": Case("", "completions", command="predict one other.jsonl --out a.csv"),
    "evaluate: another aggregate": Case(
        "evaluate cannot change reward", "start a new run", command="evaluate one reward.aggregate=mean"
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_mistake_with_steps_is_told(case: RowsCase, finished: Path, assert_rows_refused: AssertRowsRefused) -> None:
    assert_rows_refused(case, one=finished)
