"""Mistakes with `workbench lr` end in status 2 and a message with place and cure, before training."""

from __future__ import annotations

import pytest

from tests.mistakes.cases import AssertRefused, Case, file

LR = "lr my.yaml"
CASES = {
    "a sweep already": Case(
        f"{LR} recipe=sweep 'sweep.over={{seed: [0, 1]}}' evaluate.every=1",
        "recipe=sweep",
        "Write recipe=classify|mlm|sft",
    ),
    "many adapters": Case("lr crossval/quickstart", "recipe=crossval", "and use its rate here"),
    "two models": Case(
        f"{LR} recipe=distill distill.teacher.id=stories", "recipe=distill", "Write recipe=classify|mlm|sft"
    ),
    "rows by their losses": Case(
        f"{LR} data.sampling.by=importance", "data.sampling.by=importance", "Write data.sampling.by=all"
    ),
    "rows by the backbone": Case(
        f"{LR} data.select.by=perplexity data.select.rows=5", "data.select.by=perplexity", "data.select.by=random"
    ),
    "an order by losses": Case(
        f"{LR} data.curriculum.by=self_paced", "the search for a rate has several", "curriculum.by=length"
    ),
    "no rate": Case(f"{LR} --lowest 0", "--lowest 0", "Write --lowest 1e-4 --highest 1e-1"),
    "rates the wrong way round": Case(f"{LR} --lowest 1e-2 --highest 1e-4", "--highest 0.0001", "the higher one last"),
    "rates without end": Case(f"{LR} --highest inf", "--highest inf", "expected two rates"),
    "a rate in words": Case(f"{LR} --lowest low", "--lowest", "valid number"),
    "two rates": Case(f"{LR} --rates 2", "--rates", "greater than or equal to 3"),
    "too few steps to tell": Case(f"{LR} --steps 4", "--steps", "greater than or equal to 8"),
    "a file in the way": Case(f"{LR} --out taken", "taken", "", file("taken", "")),
    "no such recipe": Case("lr sft/quikstart", "sft/quikstart", "Did you mean `sft/quickstart`?"),
    "several rates": Case(f"{LR} 'train.learning_rate=[1e-4, 1e-3]'", "train.learning_rate", "valid number"),
    "a peer's name": Case(f"{LR} --min-lr 1e-5", "--min-lr", "No such option"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_message_says_where_and_what_to_write(case: Case, assert_refused: AssertRefused) -> None:
    assert_refused(case)
