"""Mistakes with recipe embed end in status 2 and a message with place and cure, before a weight is read."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.mistakes.cases import AssertRowsRefused, RowsCase

RECIPE = """
recipe: embed
model: {id: stories, weights: float32}
adapter: {method: lora, rank: 2}
data: {train: rows.jsonl, held_out: 0.2, max_tokens: 64}
batch: {size: 4}
train: {steps: 2}
evaluate: {every: null}
"""
ROWS = [{"anchor": f"Where is {n}?", "positive": f"Here is {n}."} for n in range(20)]
SCORED = [{"sentence1": f"a {n}", "sentence2": f"b {n}", "score": n % 3 / 2} for n in range(20)]
CLASSES = [{"text": f"The {name} said {n}.", "label": name} for n in range(10) for name in ("cat", "dog")]


Case = partial(RowsCase, rows=ROWS)


def first(rows: list[dict[str, Any]], **columns: Any) -> list[dict[str, Any]]:
    """Rows with other values in the first."""
    return [{**rows[0], **columns}, *rows[1:]]


CASES = {
    # Rows.
    "answers among texts": Case(
        "data.clean=refusal judges answers to prompts, and recipe=embed reads texts",
        "Leave it out of data.clean",
        "data.clean=[refusal]",
    ),
    "unknown columns": Case(
        "rows.jsonl: its columns are `q`, `a`", "data.columns='{anchor: NAME", rows=[{"q": "a", "a": "b"}]
    ),
    "columns of two forms": Case(
        "fit pairs and labelled rows", "Leave out those", rows=[{**ROWS[0], "text": "a", "label": "b"}]
    ),
    "no such column": Case(
        "rows.jsonl has no column `ancor`", "Did you mean `anchor`?", "'data.columns={anchor: ancor}'"
    ),
    "no such wanted column": Case(
        "`anchr` is no column that recipe embed reads", "Did you mean `anchor`?", "'data.columns={anchr: anchor}'"
    ),
    "empty anchor": Case("row 1: `anchor` is empty", "data.on_bad_row=skip", rows=first(ROWS, anchor=" ")),
    "labels that contradict each other": Case(
        "has only rows whose text has several labels, the first rows.jsonl, row 1 (`cat`, `dog`)",
        "Give each text one label",
        rows=[{"text": "The same.", "label": name} for name in ("cat", "dog")],
    ),
    "a number as text": Case("row 1: `positive` must be text, found 3", "Correct them", rows=first(ROWS, positive=3)),
    "the same text twice": Case(
        "`anchor` and `positive` are the same text", "Leave the row out", rows=first(ROWS, positive="where is 0")
    ),
    "negatives that are no list": Case(
        "`negatives` must be a list of texts, found 'no'", "Write ['no']", rows=first(ROWS, negatives="no")
    ),
    "the positive as a negative": Case(
        "row 1: its positive is among its negatives", "Leave it out", rows=first(ROWS, negative="Here is 0!")
    ),
    "score that is no number": Case(
        "row 1: `score` must be a number, found 'high'", "Correct them", rows=first(SCORED, score="high")
    ),
    "scores all alike": Case("every score is 1", "nothing to learn", rows=[{**row, "score": 1} for row in SCORED]),
    "scores beyond a cosine": Case(
        "`score` is 5", "write embed.loss=cosent", "embed.loss=cosine", rows=first(SCORED, score=5)
    ),
    "no class": Case("row 1: `label` must be the name", "Correct them", rows=first(CLASSES, label=None)),
    "one class": Case("every label is `cat`", "Give rows of another class", rows=CLASSES[::2]),
    "classes of one text": Case(
        "no class has two different texts",
        "Give more rows",
        "data.held_out=other.jsonl",
        rows=[{"text": f"it is {n}", "label": n} for n in range(9)],
        other=[{"text": "it was", "label": 1}],
    ),
    # Splits.
    "held-out rows of another form": Case(
        "other.jsonl: has columns of scored rows, and the training rows are pairs ones",
        "anchor, positive",
        "data.held_out=other.jsonl",
        other=SCORED,
    ),
    "rows in both files": Case(
        "1 of 20 training rows are also in other.jsonl",
        "data.overlap=drop",
        "data.held_out=other.jsonl",
        other=[{**ROWS[0], "negative": "Nowhere."}],
    ),
    "every row in both files": Case(
        "every row is also in other.jsonl", "nothing is left", "data.held_out=other.jsonl", other=ROWS
    ),
    "a class that nothing was trained on": Case(
        "other.jsonl, row 1: no training row has the class `fox`",
        "Leave the row out",
        "data.held_out=other.jsonl",
        rows=CLASSES,
        other=[{"text": "a fox", "label": "fox"}],
    ),
    "rows that all share a text": Case(
        "cannot be held out in part",
        "a file of its own",
        rows=[{"anchor": f"q {n}", "positive": "all"} for n in range(9)],
    ),
    # Losses.
    "a loss of pairs for scores": Case(
        "embed.loss=triplet is not for scored rows", "Write embed.loss=cosent|cosine", "embed.loss=triplet", rows=SCORED
    ),
    "triplets without negatives": Case(
        "row 1: embed.loss=triplet needs a negative", "write embed.mine=1", "embed.loss=triplet"
    ),
    "mining for scores": Case(
        "embed.mine and embed.symmetric are for pairs", "Leave them out", "embed.mine=2", rows=SCORED
    ),
    "a passage's instruction for classes": Case(
        "embed.passage_prefix is for rows with two sides",
        "embed.query_prefix",
        "embed.passage_prefix=a",
        rows=CLASSES,
    ),
    "a batch of one": Case("batch.size=1: embed.loss=contrastive", "Write batch.size=32", "batch.size=1"),
    "no such loss": Case("embed.loss", "contrastive", "embed.loss=mnrl"),
    "symmetric triplets": Case(
        "symmetric is for loss contrastive", "Leave it out", "embed.loss=triplet embed.symmetric=true"
    ),
    "margin without triplets": Case("margin is for loss triplet", "write loss: triplet", "embed.margin=0.5"),
    "temperature of cosines": Case(
        "temperature is for losses contrastive and cosent",
        "Leave it out",
        "embed.loss=cosine embed.temperature=1",
        rows=SCORED,
    ),
    "mined bound for classes": Case(
        "embed.mine_below is for rows that say nothing of other rows",
        "Leave it out",
        "embed.mine=1 embed.mine_below=0.5",
        rows=CLASSES,
    ),
    "mined bound without mining": Case("mine_below is for mined negatives", "Write mine: 3", "embed.mine_below=0.9"),
    "size twice": Case("sizes names 8 twice", "Name each size once", "embed.sizes=[8,8]"),
    "size too large": Case("embed.sizes: 128 is more than the 64 numbers", "Write sizes up to 64", "embed.sizes=[128]"),
    "dot products of triplets": Case(
        "loss triplet compares cosines", "Write normalise: true", "embed.loss=triplet embed.normalise=false"
    ),
    # Backbones.
    "first token of a causal backbone": Case(
        "embed.pooling=first: the first token of the causal", "Write embed.pooling=last", "embed.pooling=first"
    ),
    "an encoder-decoder": Case("model.id=t5", "Take an encoder or a causal backbone", "model.id=t5"),
    "a backbone for pictures": Case("starter/vision", "Take another one", "model.id=starter/vision"),
    "virtual tokens": Case("adapter.method=prompt", "Use adapter.method=lora", "adapter.method=prompt"),
    # Sections that do not go together.
    "embed elsewhere": Case("embed is for recipe=embed", "Leave embed out", "recipe=sft embed.mine=2"),
    "classes": Case("classes is for recipe=classify", "Leave classes out", "classes.gamma=1"),
    "pictures": Case("data.format=image is for recipe=classify", "recipe=embed reads text", "data.format=image"),
    "keys of written text": Case("recipe=embed reads columns of text", "leave data.loss_on out", "data.loss_on=all"),
    "chosen rows": Case(
        "compares the rows of a batch with each other", "leave data.sampling out", "data.sampling.by=tilted"
    ),
    "weights of rows": Case("rows of recipe=embed count once each", "Leave it out", "'data.columns={weight: w}'"),
    "weights chosen by single rows": Case(
        "looks at the loss of single rows, and that of recipe=embed",
        "Write adapter.by=magnitude",
        "'adapter={method: sparse}'",
    ),
    "noise scale": Case("recipe=embed has one loss of the whole", "Leave it out", "optimizer.noise_scale=2"),
    "kept outputs": Case(
        "recipe=embed reads rows of several texts",
        "Write freeze.cache=off",
        "freeze.policy=static freeze.layers=2 freeze.cache=memory",
    ),
    "smoothed labels": Case(
        "regularise.label_smoothing is for losses", "Leave it out", "regularise.label_smoothing=0.1"
    ),
    "packed texts of another kernel": Case(
        "batch.packing=true needs sdpa", "model.attention=auto", "batch.packing=true model.attention=eager"
    ),
    # Verbs.
    "evaluate: pooling": Case(
        "evaluate cannot change embed", "start a new run", "embed.pooling=last", command="evaluate one"
    ),
    "predict: no text": Case(
        "other.jsonl: has none of the columns text, query",
        "data.columns='{text: NAME}'",
        other=[{"a": "b"}],
        command="predict one other.jsonl --out a.parquet",
    ),
    "generate": Case("recipe embed trains no model that writes text", "workbench predict", command="generate one Hi"),
    "lr": Case("recipe", "embed", command="lr my.yaml"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_mistake_is_told(
    case: RowsCase, encoder_decoder: str, finished: Path, assert_rows_refused: AssertRowsRefused
) -> None:
    assert_rows_refused(case, t5=encoder_decoder, one=finished)
