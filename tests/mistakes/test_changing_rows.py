"""Mistakes with `data.augment` and `data.length_warm_up` end in status 2 and a message with place and cure."""

from __future__ import annotations

import pytest

from tests.mistakes.cases import AssertRefused, Case, lines

CHECK = "check my.yaml"
NAMES = "data.augment.operators"
WORDS, LENGTH = f"'{NAMES}=[drop_words]'", "data.length_warm_up"
CUT = f"{LENGTH}.start=8"
LABELLED = f"{CHECK} recipe=classify"
OVER = "'{train.learning_rate: [1.0e-4, 1.0e-3]}'"
TEXTS = lines([{"text": f"{name}{n}", "label": name} for n in range(3, 8) for name in ("cat", "dog")], "t.jsonl")
CASES = {
    "written text": Case(f"{CHECK} {WORDS}", "recipe=sft learns to write", "Leave data.augment out"),
    "hidden words": Case(f"{CHECK} {WORDS} recipe=mlm", "recipe=mlm learns to write", "recipe=classify|crossval"),
    "written text, run": Case(f"run my.yaml {WORDS} --out two", "learns to write", "Leave data.augment out"),
    "pictures": Case(f"{LABELLED} {WORDS} data.format=image", "rewrites words", "Write image.augment"),
    "two responses": Case(f"{LABELLED} {WORDS} classes.kind=pair", "change which is better", "Leave data.augment out"),
    "kept outputs": Case(
        f"{LABELLED} {WORDS} freeze.policy=static freeze.cache=memory", "none comes twice", "freeze.cache=off"
    ),
    "a student": Case(
        f"{CHECK} {WORDS} recipe=distill of=classify distill.teacher.id=backbone",
        "a teacher is asked about rows as they are",
        "Leave it out",
    ),
    "no such operator": Case(f"{CHECK} '{NAMES}=[drop_word]'", NAMES, "'drop_words'"),
    "an operator twice": Case(f"{CHECK} '{NAMES}=[typos, typos]'", "typos appears twice", "Name each operator once"),
    "settings of none": Case(f"{CHECK} data.augment.noise=0.2", "no operator is named", f"Write {NAMES}=[drop_words]"),
    "noise of letters": Case(f"{LABELLED} '{NAMES}=[upper]' data.augment.noise=0.2", "noise is for", "leave noise out"),
    "in percent": Case(f"{LABELLED} {WORDS} data.augment.probability=50", "data.augment.probability", "1"),
    "no such key": Case(f"{CHECK} data.augment.share=0.1", "share: unknown key", "data.augment"),
    "single words": Case(
        f"{LABELLED} data.train=t.jsonl data.held_out=0.2 {WORDS}",
        "drop_words changes none of 8 training rows",
        "Leave drop_words out",
        TEXTS,
    ),
    "answers at the end": Case(f"{CHECK} {CUT}", "would cut all that carries loss", f"Write {LENGTH}.start="),
    "answers at the end, run": Case(f"run my.yaml {CUT} --out two", "would cut all that carries loss", "or leave"),
    "longer than any row": Case(f"{CHECK} {LENGTH}.start=512", "so that none is cut", "Write a smaller start"),
    "shorter than a multiple": Case(f"{CHECK} {LENGTH}.start=4", f"{LENGTH}.start", "8"),
    "an end without a start": Case(f"{CHECK} {LENGTH}.until=0.5", "until ends what start", f"Write {LENGTH}.start=64"),
    "labelled rows": Case(f"{LABELLED} {CUT}", "which is for recipe=sft", f"Leave {LENGTH} out"),
    "masked rows": Case(f"{CHECK} {CUT} recipe=mlm", "not for recipe=mlm", f"Leave {LENGTH} out"),
    "a sweep": Case(f"{CHECK} {CUT} recipe=sweep sweep.over={OVER}", "read whole rows", "Leave it out"),
    "a teacher": Case(f"{CHECK} {CUT} recipe=distill distill.teacher.id=backbone", "read whole rows", "Leave it out"),
    "the search for a rate": Case(f"lr my.yaml {CUT}", "read whole rows", "Leave it out"),
    "budget alone": Case(
        f"{CHECK} {CUT} train.epochs=null train.steps=null budget.tokens=1000",
        "budget alone ends the run",
        "train.epochs",
    ),
    "rows by their losses": Case(
        f"{CHECK} {CUT} data.sampling.by=importance", "weighs rows by all their tokens", "Leave one of them out"
    ),
    "several sources": Case(
        f"{CHECK} {CUT} data.train=null data.sources.a.path=rows.jsonl data.sources.b.path=more.jsonl",
        "data.sources mixes several",
        "Leave one of them out",
    ),
    "outputs of whole rows": Case(
        f"{CHECK} {CUT} freeze.policy=static freeze.cache=disk", "for whole rows", "Write freeze.cache=off"
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_message_says_where_and_what_to_write(case: Case, assert_refused: AssertRefused) -> None:
    assert_refused(case)
