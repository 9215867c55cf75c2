"""Mistakes with recipe rerank end in status 2 and a message with place and cure, before a weight is read."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.mistakes.cases import AssertRowsRefused, RowsCase

RECIPE = """
recipe: rerank
model: {id: stories, weights: float32}
adapter: {method: lora, rank: 2}
data: {train: rows.jsonl, held_out: 0.2, max_tokens: 64}
rerank: {negatives: 2, candidates: 4}
batch: {size: 4}
train: {steps: 2}
evaluate: {every: null}
"""
ROWS = [{"anchor": f"Where is {n}?", "positive": f"Here is {n}."} for n in range(20)]
SCORED = [{"sentence1": f"a {n}", "sentence2": f"b {n}", "score": n % 3 / 2} for n in range(20)]
CLASSES = [{"text": f"The {name} said {n}.", "label": name} for n in range(10) for name in ("cat", "dog")]


Case = partial(RowsCase, rows=ROWS)
PLAIN = "rerank={}"


CASES = {
    # Rows.
    "classes": Case("rows.jsonl: has texts with classes", "Recipes embed and classify learn classes", rows=CLASSES),
    "unknown columns": Case("its columns are `q`, `a`", "data.columns='{anchor: NAME", rows=[{"q": "a", "a": "b"}]),
    "the positive among the negatives": Case(
        "its positive is among its negatives", "Leave it out of them", rows=[{**ROWS[0], "negative": "Here is 0."}]
    ),
    "a long query": Case(
        "leaves no passage beside; queries are not cut",
        "Write data.max_tokens=",
        rows=[{"anchor": "Where was the big dog? " * 20, "positive": "Here."}, *ROWS],
    ),
    "too few passages": Case(
        "are not known to belong to its query, and rerank.negatives=30 needs more",
        "Write rerank.negatives=",
        "rerank.negatives=30",
    ),
    "one query, whose passages all belong": Case(
        "0 are not known to belong",
        "Give rows with other passages",
        "data.held_out=other.jsonl",
        rows=[{"anchor": "Where?", "positive": f"Here is {n}."} for n in range(9)],
        other=[{"anchor": "Why?", "positive": "So.", "negatives": ["Because.", "No."]}],
    ),
    "one score": Case("every score is 1", "nothing to learn", PLAIN, rows=[{**row, "score": 1} for row in SCORED]),
    "scores that are no probabilities": Case(
        "`score` is 5, and rerank.loss=bce takes scores for probabilities",
        "Scale scores to 0 to 1, or write rerank.loss=mse",
        PLAIN,
        rows=[*SCORED, {**SCORED[0], "sentence1": "c", "score": 5}],
    ),
    # Losses and negatives.
    "a loss for pairs": Case(
        "rerank.loss=softmax is not for scored rows", "rerank.loss=bce|mse", "'rerank={loss: softmax}'", rows=SCORED
    ),
    "a loss for scores": Case(
        "rerank.loss=mse is not for pairs rows", "rerank.loss=softmax|bce", "'rerank={loss: mse}'"
    ),
    "negatives of scores": Case(
        "rerank.negatives and rerank.candidates: for rows with a positive", "Leave it out", rows=SCORED
    ),
    "negatives of mse": Case("loss mse reads scores", "Leave them out", "rerank.loss=mse"),
    "temperature of another loss": Case(
        "temperature is for loss softmax; loss is bce", "Leave it out", "rerank.loss=bce rerank.temperature=2"
    ),
    "an embedder without mining": Case(
        "embedder is for mined negatives, and mine is 0", "Write mine: 3", "rerank.embedder=one"
    ),
    "an embedder that is none": Case(
        "rerank.embedder=stories: not a run directory",
        "Name a run of recipe=embed",
        "rerank.mine=1 rerank.embedder=stories",
    ),
    "an embedder that reranks": Case(
        "its run is of recipe=rerank, which embeds no texts",
        "Name a run of recipe=embed",
        "rerank.mine=1 rerank.embedder=one",
    ),
    "one candidate": Case("rerank.candidates", "greater than or equal to 2", "rerank.candidates=1"),
    "no such loss": Case("rerank.loss", "softmax", "rerank.loss=listnet"),
    # Other sections.
    "a section of another recipe": Case("embed is for recipe=embed", "Leave embed out", "embed.pooling=last"),
    "this section elsewhere": Case("rerank is for recipe=rerank", "Leave rerank out", "recipe=embed"),
    "rows by their loss": Case(
        "draws passages of other rows beside each row", "leave data.curriculum out", "data.curriculum.by=length"
    ),
    "weights": Case(
        "rows of recipe=rerank count once each",
        "Leave it out",
        "'data.columns={weight: w}'",
        rows=[{**row, "w": 1} for row in ROWS],
    ),
    "packed rows": Case(
        "batch.packing=true is for recipe=", "recipe=rerank trains on padded rows", "batch.packing=true"
    ),
    "smoothed labels": Case(
        "regularise.label_smoothing is for losses", "Leave it out", "regularise.label_smoothing=0.1"
    ),
    "an encoder-decoder": Case("which recipe rerank does not read", "Take an encoder or a causal", "model.id=t5"),
    # Verbs.
    "evaluate: candidates": Case(
        "evaluate cannot change rerank", "start a new run", "rerank.candidates=9", command="evaluate one"
    ),
    "predict: no passage": Case(
        "other.jsonl: has none of the columns passages, passage",
        "data.columns='{query: NAME, passage: NAME}'",
        other=[{"query": "b"}],
        command="predict one other.jsonl --out a.parquet",
    ),
    "predict: no list": Case(
        "`passages` must be a list of texts",
        "other.jsonl",
        other=[{"query": "b", "passages": "c"}],
        command="predict one other.jsonl --out a.parquet",
    ),
    "generate": Case("recipe rerank trains no model that writes text", "workbench predict", command="generate one Hi"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_mistake_is_told(
    case: RowsCase, encoder_decoder: str, finished: Path, assert_rows_refused: AssertRowsRefused
) -> None:
    assert_rows_refused(case, t5=encoder_decoder, one=finished)
