"""Mistakes with `data.sources` end in status 2 and a message with place and cure, before training."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mistakes.cases import AssertRefused, Case, lines

CHECK = "check my.yaml data.train=null"
A, B = "data.sources.a.path=a.jsonl", "data.sources.b.path=b.jsonl"
BOTH = f"{CHECK} {A} {B}"
LEARNED = "data.mix.by=learned"


def two(folder: Path) -> None:
    """Rows of two sources, and a file that holds some of the first one's."""
    for name in ("a", "b"):
        rows = [{"question": f"{name} {n} of them?", "answer": f"{name} {n * n}."} for n in range(40)]
        lines(rows, f"{name}.jsonl")(folder)


def copied(folder: Path) -> None:
    """The same, and a file of rows that are trained on too, in capitals."""
    two(folder)
    rows = [{"question": f"WHAT COMES AFTER {n}", "answer": f"IT IS {n + 1}"} for n in range(12)]
    lines(rows, "c.jsonl")(folder)


def paired(folder: Path) -> None:
    """Pairs of texts of two sources."""
    for name in ("p", "q"):
        lines([{"anchor": f"{name} {n} is?", "positive": f"{name} {n * n}."} for n in range(40)], f"{name}.jsonl")(
            folder
        )


CASES = {
    "no rows at all": Case(CHECK, "train is required", "data.sources", two),
    "two ways": Case(f"check my.yaml {A} {B} data.train=a.jsonl", "both name training rows", "Leave one", two),
    "one": Case(f"{CHECK} {A}", "sources mixes two or more", "write data.train", two),
    "a file twice": Case(f"{CHECK} {A} data.sources.b.path=a.jsonl", "names a.jsonl twice", "a larger weight", two),
    "no path": Case(f"{CHECK} {A} data.sources.b.weight=2", "data.sources.b.path", "is required", two),
    "no such file": Case(f"{CHECK} {A} data.sources.b.path=c.jsonl", "c.jsonl: no such file", "jsonl", two),
    "no weight": Case(f"{BOTH} data.sources.a.weight=0", "data.sources.a.weight", "0", two),
    "an odd name": Case(
        f"{BOTH} 'data.sources={{a b: {{path: a.jsonl}}, c: {{path: b.jsonl}}}}'", "letters", "digits", two
    ),
    "mix of one": Case("check my.yaml data.mix.temperature=2", "there is one", "leave mix out"),
    "temperature of weights": Case(
        f"{BOTH} data.mix.by=weight data.mix.temperature=2", "mix.by=weight has none", "Leave one", two
    ),
    "cold": Case(f"{BOTH} data.mix.temperature=0.5", "data.mix.temperature", "1", two),
    "pairs that are learned": Case(
        f"{BOTH} recipe=reward {LEARNED}", "recipe=reward compares answers", "Write data.mix.by=size or weight", two
    ),
    "batches that are learned": Case(
        f"{BOTH} recipe=embed {LEARNED}", "recipe=embed compares rows of a batch", "Write data.mix.by=size", two
    ),
    "rewards that are learned": Case(
        f"{BOTH} recipe=reinforce {LEARNED}", "recipe=reinforce compares rewards", "Write data.mix.by=size", two
    ),
    "a teacher's words that are learned": Case(
        f"{BOTH} recipe=distill distill.teacher.id=backbone {LEARNED}",
        "data.mix.by=learned: compares sources by losses of rows, and a distillation measures none",
        "Write data.mix.by=size or weight",
        two,
    ),
    "rows without labels between": Case(
        f"{BOTH} recipe=distill of=classify distill.teacher.id=t distill.unlabelled=c.jsonl",
        "distill.unlabelled: its rows would be drawn between those of data.sources",
        "Leave it out, or write data.train",
        two,
    ),
    "folds of weights": Case(
        f"{BOTH} recipe=crossval of=classify data.sources.a.weight=2 data.mix.temperature=2",
        "data.sources.a.weight, data.mix: recipe=crossval deals the rows of all sources into folds as one set",
        "Leave it out",
        two,
    ),
    "folds of passes": Case(
        f"{BOTH} recipe=crossval of=classify data.sources.b.passes=2",
        "data.sources.b.passes: recipe=crossval",
        "Leave it out",
        two,
    ),
    "a source called as a reward": Case(
        f"{CHECK} data.sources.number.path=a.jsonl {B} recipe=reinforce 'rewards=[{{kind: number}}]'",
        "data.sources.number: mean rewards of a source and of a reward would have one name",
        "Give the source another one",
        two,
    ),
    "batches of one source of answers": Case(
        f"{BOTH} data.mix.batches=one_source", "data.mix.batches=one_source is for recipe=embed", "Leave it out", two
    ),
    "batches of one source and passes": Case(
        f"{BOTH} recipe=embed data.mix.batches=one_source data.sources.a.passes=2",
        "data.sources.a.passes counts rows, and data.mix.batches=one_source draws whole batches",
        "Leave one of them out",
        two,
    ),
    "a source called as a size": Case(
        f"{CHECK} data.sources.8.path=a.jsonl {B} recipe=embed embed.sizes=[8]",
        "data.sources.8: scores of a set and of embeddings of embed.sizes would have one name",
        "Give the set another one",
        two,
    ),
    "too many passes of pairs": Case(
        f"{CHECK} recipe=embed data.sources.a.path=p.jsonl data.sources.b.path=q.jsonl "
        "data.sources.a.passes=1 train.steps=90",
        "data.sources.a.passes=1",
        "Write a lower",
        paired,
    ),
    "classes drawn": Case(
        f"{BOTH} recipe=classify classes.sampling=even",
        "draws rows by their class, and data.sources by their source",
        "classes.weights=balanced",
        two,
    ),
    "a source that is not left": Case(
        f"{BOTH} data.test=b.jsonl data.overlap=drop", "every row is also in b.jsonl", "nothing is left", two
    ),
    "with a curriculum": Case(f"{BOTH} data.curriculum.by=length", "orders the rows of one source", "Leave one", two),
    "with a choice by the backbone": Case(
        f"{BOTH} data.select.by=perplexity data.select.rows=9", "chooses from one source", "Leave one of them out", two
    ),
    "a choice that leaves a source out": Case(
        f"{BOTH} data.select.by=random data.select.rows=1", "no row of it is left", "keep more of its rows", two
    ),
    "too many passes": Case(
        f"{BOTH} data.sources.a.passes=2 train.steps=90", "data.sources.a.passes=2", "Write a lower", two
    ),
    "passes of a budget": Case(
        f"{BOTH} data.sources.a.passes=2 train.epochs=null train.steps=null budget.tokens=9999",
        "nobody knows how many passes",
        "train.steps",
        two,
    ),
    "a test set of all": Case(f"{BOTH} data.held_out=b.jsonl", "data.held_out names the training file", "a share", two),
    "named sets of folds": Case(
        "check my.yaml recipe=crossval of=classify 'data.held_out={a: a.jsonl}'",
        "recipe=crossval validates on folds",
        "Leave data.held_out out",
        two,
    ),
    "a set named as a size": Case(
        "check my.yaml recipe=embed embed.sizes=[8] data.test.8=a.jsonl",
        "data.test.8: scores of a set and of embeddings of embed.sizes would have one name",
        "Give the set another one",
        two,
    ),
    "named sets, one of which is trained on": Case(
        "check my.yaml data.decontaminate.action=refuse 'data.test={a: a.jsonl, b: rows.jsonl}'",
        "training rows are also in rows.jsonl",
        "data.overlap=drop",
        two,
    ),
    "named sets, decontaminated": Case(
        "check my.yaml data.decontaminate.action=refuse 'data.test={a: a.jsonl, c: c.jsonl}'",
        "(data.test.c)",
        "data.decontaminate.action=drop",
        copied,
    ),
    "no set": Case("check my.yaml 'data.held_out={}'", "names no file", "a share such as", two),
    "a set without a file": Case("check my.yaml 'data.test={a: c.jsonl}'", "c.jsonl: no such file", "jsonl", two),
    "an odd set": Case("check my.yaml 'data.test={a/b: a.jsonl}'", "test.a/b: names have letters", "digits", two),
    "learns from one": Case("check my.yaml data.mix.by=learned", "there is one", "leave mix out"),
    "a mix misspelt": Case(f"{BOTH} data.mix.by=learnt", "data.mix.by", "'learned'", two),
    "a step of what is not learnt": Case(
        f"{BOTH} data.mix.step_size=2", "for mix.by=learned, not for mix.by=size", "Leave step_size out", two
    ),
    "windows of weights": Case(
        f"{BOTH} data.mix.by=weight data.mix.every=5", "for mix.by=learned", "Leave every out", two
    ),
    "no step": Case(f"{BOTH} {LEARNED} data.mix.step_size=0", "data.mix.step_size", "greater than 0", two),
    "nothing but the beginning": Case(f"{BOTH} {LEARNED} data.mix.smoothing=1", "data.mix.smoothing", "1", two),
    "windows of nothing": Case(f"{BOTH} {LEARNED} data.mix.every=0", "data.mix.every", "0", two),
    "half of the references": Case(
        f"{BOTH} {LEARNED} 'data.mix.reference={{a: 1.5}}'",
        "mix.reference names a, and sources a, b",
        "Write the loss of each source",
        two,
    ),
    "a reference in words": Case(
        f"{BOTH} {LEARNED} 'data.mix.reference={{a: 1.5, b: low}}'", "data.mix.reference.b", "number", two
    ),
    "a negative reference": Case(
        f"{BOTH} {LEARNED} 'data.mix.reference={{a: 1.5, b: -1}}'", "data.mix.reference.b", "0", two
    ),
    "too few passes to learn in": Case(
        f"{BOTH} {LEARNED} train.steps=90 data.sources.a.passes=2 data.sources.b.passes=1",
        "their `passes` allow 96 rows",
        "Write more passes",
        two,
    ),
    "passes of a budget, learned": Case(
        f"{BOTH} {LEARNED} data.sources.a.passes=2 train.epochs=null train.steps=null budget.tokens=9999",
        "nobody knows how many passes",
        "train.steps",
        two,
    ),
    "members that learn": Case(
        f"{BOTH} {LEARNED} recipe=sweep of=sft 'sweep={{over: {{seed: [0, 1]}}}}' evaluate.every=0.5",
        "by=learned gives each member rows of its own",
        "data.mix.by=weight",
        two,
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_message_says_where_and_what_to_write(case: Case, assert_refused: AssertRefused) -> None:
    assert_refused(case)
