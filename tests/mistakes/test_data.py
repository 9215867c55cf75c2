"""Mistakes with `workbench data` and `data.clean` end in status 2 and a message with place and cure."""

from __future__ import annotations

import pytest

from tests.mistakes.cases import AssertRefused, Case, backbone, file, lines, removed

TEXTS = lines(
    [{"text": f"The {name} said {n}.", "label": name} for n in range(9) for name in ("cat", "dog")], "t.jsonl"
)
PLAIN = lines([{"text": f"A story of {n} foxes."} for n in range(9)], "p.jsonl")
EMPTY = lines([{"question": "Who?", "answer": ""}], "e.jsonl")
SAID = lines([{"said": "x"}], "u.jsonl")
CURLY = lines([{"question": f"{{{n}}}", "answer": "{}"} for n in range(9)], "c.jsonl")
CLASSIFY = "recipe=classify data.train=t.jsonl evaluate.answers=64"
CROSSVAL = "recipe=crossval of=classify data.train=t.jsonl data.held_out=0.05 evaluate.answers=64"
CASES = {
    "no such rule": Case("check my.yaml data.clean=[refusals]", "no such rule `refusals`", "Did you mean `refusal`?"),
    "no such rule, all told": Case(
        "run my.yaml data.clean=[quality]", "no such rule `quality`", "Known: answer_repeats_prompt"
    ),
    "a rule that only reports": Case("check my.yaml data.clean=[perplexity]", "no such rule `perplexity`", "Known:"),
    "twice": Case("check my.yaml data.clean=[refusal,symbols,refusal]", "refusal appears twice", "Name each rule once"),
    "a word": Case("check my.yaml data.clean=refusal", "data.clean", "found 'refusal'"),
    "a switch": Case("check my.yaml data.clean=true", "data.clean", "found True"),
    "nothing left": Case(
        "check my.yaml data.clean=[c4_curly_brackets] data.train=c.jsonl",
        "c.jsonl: data.clean would leave none",
        "Leave it out of data.clean",
        CURLY,
    ),
    "nothing left by length": Case(
        "run my.yaml data.clean=[gopher_words]", "gopher_words, made for web documents", "Leave it out of data.clean"
    ),
    "no answers": Case(
        "check my.yaml data.clean=[refusal] data.train=p.jsonl",
        "p.jsonl: data.clean names refusal",
        "Leave it out of data.clean",
        PLAIN,
    ),
    "answers of labelled texts": Case(
        f"check my.yaml {CLASSIFY} data.clean=[empty_turn]", "empty_turn", "Leave it out of data.clean", TEXTS
    ),
    "answers of masked texts": Case(
        "check my.yaml recipe=mlm data.clean=[refusal,symbols]", "recipe=mlm reads texts", "Leave it out of data.clean"
    ),
    "duplicates of folds": Case(
        f"check my.yaml {CROSSVAL} data.clean=[near_duplicate]",
        "looks for duplicates itself",
        "duplicates.on_duplicate=keep_one does the same",
        TEXTS,
    ),
    "pictures": Case(
        "check my.yaml recipe=classify data.format=image data.clean=[symbols]",
        "data.clean=symbols: judges texts by their words",
        "Leave it out; pictures have exact_duplicate and near_duplicate.",
    ),
    "no such recipe": Case("data sft/quickstrat", "sft/quickstrat: no such recipe", "Did you mean `sft/quickstart`?"),
    "no such file": Case("data my.yaml data.train=row.jsonl", "row.jsonl: no such file", "Did you mean `rows.jsonl`?"),
    "no row that can be read": Case(
        "data my.yaml data.train=e.jsonl", "none of its 1 rows can be used", "`answer` is empty", EMPTY
    ),
    "unknown columns": Case("data my.yaml data.train=u.jsonl", "`said`, fit no known format", "data.columns=", SAID),
    "the folder is a file": Case("data my.yaml --out there/x", "there", "name another", file("there", "")),
    "perplexity of labels": Case(
        f"data my.yaml {CLASSIFY} --perplexity all", "--perplexity is measured on the tokens", "Leave it out", TEXTS
    ),
    "perplexity of some": Case(
        "data my.yaml --perplexity some", "--perplexity=some: write auto, all, off", "a number of rows such as 500"
    ),
    "perplexity of no row": Case("data my.yaml --perplexity 0", "--perplexity=0", "a number of rows such as 500"),
    "perplexity without weights": Case(
        "data my.yaml --perplexity all model.id=./m",
        "no weights (*.safetensors)",
        "fetch all of it",
        backbone(removed("m/model.safetensors")),
    ),
    "a student of no one": Case(
        "data distill/quickstart",
        "distill.teacher.id=runs/sft-full: there is no such run",
        "by `workbench run sft/full`",
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_message_says_where_and_what_to_write(case: Case, assert_refused: AssertRefused) -> None:
    assert_refused(case)
