"""Mistakes with recipe reward end in status 2 and a message with place and cure, before a weight is read."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.mistakes.cases import AssertRowsRefused, RowsCase

RECIPE = """
recipe: reward
model: {id: stories, weights: float32}
adapter: {method: lora, rank: 2}
data: {train: rows.jsonl, held_out: 0.2, max_tokens: 64}
batch: {size: 4}
train: {steps: 2}
evaluate: {every: null}
"""
ROWS = [{"prompt": f"After {n}?", "chosen": f" It is {n + 1}.", "rejected": " No idea."} for n in range(20)]
RATED = [{"prompt": f"After {n}?", "completion": " Yes.", "label": n % 2 == 0} for n in range(20)]
TIES = [{**row, "tie": number in (1, 7)} for number, row in enumerate(ROWS)]
MARGINS = [{**row, "tie": number == 0, "strength": 2} for number, row in enumerate(ROWS)]
Case = partial(RowsCase, rows=ROWS, other=[{"a": "b"}])


CASES = {
    "rated answers": Case("it rates one answer (label)", "chosen and rejected", rows=RATED),
    "the same answer twice": Case(
        "row 1: `chosen` and `rejected` are the same answer",
        "data.on_bad_row=skip",
        rows=[{**ROWS[0], "rejected": ROWS[0]["chosen"]}, *ROWS[1:]],
    ),
    "no rejected answer": Case(
        "row 1: `rejected` is missing", "two answers", rows=[{**ROWS[0], "rejected": None}, *ROWS]
    ),
    "a tie that is none": Case(
        "row 1: `tie` must be true or false, found 'maybe'", "true or false", rows=[{**ROWS[0], "tie": "maybe"}, *ROWS]
    ),
    "a tie with a margin": Case(
        "row 1: is a tie, and `strength` says", "Write 0 there", "'data.columns={margin: strength}'", rows=MARGINS
    ),
    "ties alone": Case(
        "all of its 16 pairs are ties", "pairs with a better answer", rows=[{**row, "tie": True} for row in ROWS]
    ),
    "a tie of one answer": Case("rates one answer, and is a tie", "Leave `tie` out", rows=[RATED[0] | {"tie": True}]),
    "a tie for hinge": Case(
        "row 2: is a tie, as 2 rows of its file are, and prefer.loss=hinge has no target",
        "Write prefer.loss=dpo|cdpo|robust|ipo|orpo|cpo, or data.on_bad_row=skip",
        "recipe=prefer prefer.loss=hinge",
        rows=TIES,
    ),
    "a tie for simpo": Case(
        "prefer.loss=simpo has no target", "data.on_bad_row=skip", "recipe=prefer prefer.loss=simpo", rows=TIES
    ),
    "a tie for kto": Case(
        "prefer.loss=kto has no target", "data.on_bad_row=skip", "recipe=prefer prefer.loss=kto", rows=TIES
    ),
    "a fold that there is not": Case(
        "data.fold.number=5 is none of 5 folds", "from 0 to 4", "data.fold.of=5 data.fold.number=5 data.held_out=0.05"
    ),
    "a fold and a share": Case(
        "in place of data.held_out", "Leave one of them out", "data.fold.of=5 data.held_out=0.5"
    ),
    "a fold of no folds": Case("data.fold says what is held out", "Write data.fold.of=5", "data.fold.number=1"),
    "more folds than prompts": Case("form only", "Write data.fold.of=", "data.fold.of=21 data.held_out=0.05"),
    "a fold for what is sampled": Case(
        "data.fold is for recipe=classify|embed|prefer|rerank|reward|sft|tag",
        "Leave data.fold out",
        "recipe=mlm data.fold.of=5 data.held_out=0.05",
    ),
    "folds that choose steps": Case(
        "choose by the rows that the out-of-fold score is measured on",
        "Write save.ship=last",
        "recipe=crossval of=reward evaluate.every=1 save.ship=best data.held_out=0.05",
    ),
    "folds that choose an average": Case(
        "choose by the rows that the out-of-fold score is measured on",
        "leave average out",
        "recipe=crossval of=reward evaluate.every=1 average.method=ema data.held_out=0.05",
    ),
    "a file beside folds": Case("folds.k says how many", "Leave it out, or write 0.05", "recipe=crossval of=reward"),
    "a plan of a bank of rewards": Case(
        "of=reward: `plan` knows no bank of such members",
        "write recipe=reward",
        command="plan my.yaml recipe=sweep of=reward 'sweep={over: {seed: [0, 1]}}' evaluate.every=1",
    ),
    "negative centring": Case("reward.centre", "greater than or equal to 0", "reward.centre=-1"),
    "another format": Case("data.format=messages judges no answers", "leave it out", "data.format=messages"),
    "loss on tokens": Case("of which no token carries loss", "leave data.loss_on out", "data.loss_on=all"),
    "sampled rows": Case("reads rows that are judged", "leave data.sampling out", "data.sampling.by=tilted"),
    "new tokens": Case(
        "recipe=reward trains no rows of new tokens", "leave model.new_tokens out", "'model.new_tokens=[<a>]'"
    ),
    "smoothed labels": Case("not for recipe=reward", "Leave it out", "regularise.label_smoothing=0.1"),
    "kept outputs": Case(
        "recipe=reward computes two together",
        "Write freeze.cache=off",
        "freeze.policy=static freeze.layers=2 freeze.cache=memory",
    ),
    "section elsewhere": Case("reward is for recipe=reward", "Leave reward out", "recipe=sft reward.centre=1"),
    "prefer's section": Case("prefer is for recipe=prefer", "Leave prefer out", "prefer.beta=0.3"),
    "classes": Case("classes is for recipe=classify", "Leave classes out", "classes.gamma=1"),
    "dynamics": Case("evaluate.dynamics is for recipe=", "Leave it out", "evaluate.dynamics=true"),
    "an encoder-decoder": Case("model.id=t5", "Take a causal backbone", "model.id=t5"),
    "no such column": Case("data.columns", "strengh", "'data.columns={margin: strengh}'"),
    "pictures": Case("data.format=image is for recipe=classify", "recipe=reward reads text", "data.format=image"),
    "predict: no answers": Case("", "chosen", command="predict one other.jsonl --out a.csv"),
    "generate": Case(
        "recipe reward trains no model that writes text", "can rate every answer of a file", command="generate one Hi"
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_mistake_is_told(
    case: RowsCase, encoder_decoder: str, finished: Path, assert_rows_refused: AssertRowsRefused
) -> None:
    assert_rows_refused(case, t5=encoder_decoder, one=finished)
