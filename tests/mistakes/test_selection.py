"""Mistakes with `data.select` end in status 2 and a message with place and cure, before training."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.mistakes.cases import SUMS, AssertRefused, Case, lines
from workbench.errors import ConfigError
from workbench.recipes.load import load

PLACE = "data.select"
CHECK = "check my.yaml"
RANDOM, LIKE = f"{PLACE}.by=random", f"{PLACE}.by=importance"
ALIGNED = f"{CHECK} recipe=classify data.train=t.jsonl data.held_out=0.3 {PLACE}.by=gradient"
SURPRISE = f"{PLACE}.by=perplexity {PLACE}.rows=3"
OTHER = lines([{"question": "How much is a and b?", "answer": "c."}], "other.jsonl")
SILENT = lines([{"text": " "}], "silent.jsonl")
TEXTS = lines(
    [{"text": f"The {name} said {n}.", "label": name} for n in range(4, 8) for name in ("cat", "dog", "emu")], "t.jsonl"
)


def with_other(folder: Path) -> None:
    SUMS(folder)
    OTHER(folder)


def with_texts(folder: Path) -> None:
    TEXTS(folder)
    lines([{"text": "The owl said 3.", "label": "owl"}], "owls.jsonl")(folder)
    lines([{"text": "The dog said 3.", "label": "dog"}], "dogs.jsonl")(folder)
    lines([{"text": "The dog said 3."}], "bare.jsonl")(folder)


def with_silence(folder: Path) -> None:
    SUMS(folder)
    SILENT(folder)


CASES = {
    "no choice": Case(f"{CHECK} {PLACE}.rows=10", "by=all keeps them all", f"Write {RANDOM}"),
    "no budget": Case(f"{CHECK} {RANDOM}", "needs one budget", f"{PLACE}.rows=0.5"),
    "two budgets": Case(
        f"{CHECK} {RANDOM} {PLACE}.rows=3 {PLACE}.tokens=99", "needs one budget", "Leave out rows or tokens"
    ),
    "no target": Case(f"{CHECK} {LIKE} {PLACE}.rows=3", "needs rows to resemble", f"{PLACE}.target=FILE"),
    "target at random": Case(
        f"{CHECK} {RANDOM} {PLACE}.rows=3 {PLACE}.target=other.jsonl", "target is for by=importance", "Leave target out"
    ),
    "gradient without a target": Case(
        f"{CHECK} {PLACE}.by=gradient {PLACE}.rows=3", "by=gradient needs rows to resemble", f"{PLACE}.target=FILE"
    ),
    "gradient with other moments": Case(
        f"{CHECK} {PLACE}.by=gradient {PLACE}.rows=3 {PLACE}.target=other.jsonl optimizer.name=lion",
        "reads Adam's moments",
        "Write optimizer.name=adamw",
        with_other,
    ),
    "gradient without an adapter": Case(
        f"{CHECK} {PLACE}.by=gradient {PLACE}.rows=3 {PLACE}.target=other.jsonl adapter.method=full",
        "compares gradients of an adapter",
        "Write lora",
        with_other,
    ),
    "gradient of hidden words": Case(
        f"{CHECK} recipe=mlm {PLACE}.by=gradient {PLACE}.rows=3 {PLACE}.target=other.jsonl",
        "is for recipe=classify|sft, not for recipe=mlm",
        f"Write {RANDOM}",
        with_other,
    ),
    "gradient of an unknown file": Case(
        f"{CHECK} {PLACE}.by=gradient {PLACE}.rows=3 {PLACE}.target=othr.jsonl",
        "othr.jsonl: no such file",
        "other.jsonl",
        with_other,
    ),
    "gradient of a file without labels": Case(
        f"{ALIGNED} {PLACE}.rows=9 {PLACE}.target=bare.jsonl", "has no column `label`", "data.labels=FILE", with_texts
    ),
    "gradient of an unknown class": Case(
        f"{ALIGNED} {PLACE}.rows=9 {PLACE}.target=owls.jsonl", "`owl`", "owls.jsonl, row 1", with_texts
    ),
    "gradient of fewer rows than classes": Case(
        f"{ALIGNED} {PLACE}.rows=2 {PLACE}.target=dogs.jsonl", "have 3 classes", "Keep more rows", with_texts
    ),
    "the same in a run": Case(
        f"{ALIGNED.replace('check', 'run')} {PLACE}.rows=2 {PLACE}.target=dogs.jsonl --out three",
        "have 3 classes",
        "Keep more rows",
        with_texts,
    ),
    "gradient in a sweep": Case(
        f"{CHECK} recipe=sweep of=classify {PLACE}.by=gradient {PLACE}.rows=3 {PLACE}.target=other.jsonl",
        "is for recipe=classify|sft",
        f"Write {RANDOM}",
    ),
    "a warm-up of nothing": Case(
        f"{CHECK} {RANDOM} {PLACE}.rows=3 {PLACE}.warm_up=0.1", "warm_up is for by=gradient", "Leave warm_up out"
    ),
    "no such file": Case(
        f"{CHECK} {LIKE} {PLACE}.rows=3 {PLACE}.target=othr.jsonl",
        "othr.jsonl: no such file",
        "other.jsonl",
        with_other,
    ),
    "scored": Case(
        f"{CHECK} {LIKE} {PLACE}.rows=3 {PLACE}.target=other.jsonl data.held_out=other.jsonl",
        "target=other.jsonl is scored too",
        "Name other rows",
        with_other,
    ),
    "more than there are": Case(f"{CHECK} {RANDOM} {PLACE}.rows=4000", "nothing is chosen", "Write a smaller", SUMS),
    "less than a row": Case(f"{CHECK} {RANDOM} {PLACE}.tokens=2", "keeps no row", "Write a larger budget", SUMS),
    "in percent": Case(f"{CHECK} {RANDOM} {PLACE}.rows=0", f"{PLACE}.rows", "0"),
    "nothing said": Case(
        f"{CHECK} {LIKE} {PLACE}.rows=3 {PLACE}.target=silent.jsonl", "silent.jsonl", "text", with_silence
    ),
    "folds": Case(
        f"{CHECK} recipe=crossval of=classify {RANDOM} {PLACE}.rows=3", "scores every row", f"Leave {PLACE} out"
    ),
    "pictures": Case(
        f"{CHECK} recipe=classify data.format=image {LIKE} {PLACE}.rows=3 {PLACE}.target=x",
        "compares words",
        f"Write {RANDOM}",
    ),
    "a class is lost": Case(
        f"{CHECK} recipe=classify data.train=t.jsonl data.held_out=0.3 {RANDOM} {PLACE}.rows=2",
        "no training row of the class",
        "Keep more rows",
        TEXTS,
    ),
    "a band of chance": Case(f"{CHECK} {RANDOM} {PLACE}.rows=3 {PLACE}.band=low", "band is for", "Leave band out"),
    "no such band": Case(f"{CHECK} {SURPRISE} {PLACE}.band=top", f"{PLACE}.band", "'high'"),
    "perplexity of classes": Case(f"{CHECK} recipe=classify {SURPRISE}", "is for recipe=sft", f"Write {RANDOM}"),
    "perplexity of hidden words": Case(f"{CHECK} recipe=mlm {SURPRISE}", "is for recipe=sft", f"Write {RANDOM}"),
    "two backbones": Case(
        f"{CHECK} recipe=distill distill.teacher.id=backbone {SURPRISE}", "a distillation has two", f"Write {RANDOM}"
    ),
    "perplexity in a sweep": Case(f"{CHECK} recipe=sweep {SURPRISE}", "is for recipe=sft", f"Write {RANDOM}"),
    "a backbone in shares": Case(
        f"{CHECK} {SURPRISE} distributed.zero=3", "distributed cuts it", "Write distributed.zero=0"
    ),
    "more than there are, run": Case(
        f"run my.yaml {PLACE}.by=perplexity {PLACE}.rows=4000 --out two", "nothing is chosen", "Write a smaller", SUMS
    ),
    "no such key": Case(f"{CHECK} {PLACE}.row=8", "row: unknown key", "rows"),
}


BY_BACKBONE = {
    "perplexity": "by: perplexity, rows: 3",
    "a band": "by: perplexity, rows: 3, band: low",
    "a ratio": "by: ifd, rows: 3",
    "gradient": "by: gradient, rows: 3, target: other.jsonl",
    "a warm-up": "by: gradient, rows: 3, target: other.jsonl, warm_up: 0.2",
}
REFUSING = ("mlm", "reinforce", "crossval", "prefer", "reward", "embed", "rerank", "distill", "sweep", "search")


@pytest.mark.parametrize("recipe", REFUSING)
@pytest.mark.parametrize("choice", BY_BACKBONE.values(), ids=BY_BACKBONE)
def test_a_choice_by_the_backbone_is_refused_once_with_a_cure_that_is_taken(recipe: str, choice: str) -> None:
    """What is to be written, and what left out, is read from the message, and done."""
    words = [f"data.select={{{choice}}}"]
    with pytest.raises(ConfigError) as told:
        load(f"{recipe}/quickstart", words)
    told_once = str(told.value).partition("\n")[2]
    assert told_once.count("data.select.by=random") + told_once.count("eave data.select out") == 1
    assert len(re.findall(r"by=(?:perplexity|ifd|gradient)", told_once)) <= 1
    if "data.select.by=random" in told_once:
        left_out = re.findall(r"data\.select\.(target|band|warm_up)", told_once)
        kept = [key for key in choice.split(", ")[1:] if key.partition(":")[0] not in left_out]
        load(f"{recipe}/quickstart", [f"data.select={{by: random, {', '.join(kept)}}}"])
    else:
        load(f"{recipe}/quickstart")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_message_says_where_and_what_to_write(case: Case, assert_refused: AssertRefused) -> None:
    assert_refused(case)
