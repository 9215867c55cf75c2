"""Mistakes with starts along gradients end in status 2 and a message with place and cure."""

from __future__ import annotations

import pytest

from tests.mistakes.cases import AssertRefused, Case

ALONG = "check my.yaml 'adapter={method: lora-ga, %s}'"
CASES = {
    "no rows": Case(ALONG % "rows: 0", "adapter.rows", "greater than 0"),
    "part of a row": Case(ALONG % "rows: 0.5", "adapter.rows", "integer"),
    "no scale": Case(ALONG % "gamma: 0", "adapter.gamma", "greater than 0"),
    "an unknown decomposition": Case(ALONG % "decomposition: fast", "adapter.decomposition", "'randomised'"),
    "more than there is": Case(ALONG % "rank: 900", "wide. Write adapter.rank=", "or other adapter.targets"),
    "more than half of it": Case(ALONG % "rank: 33", "wide. Write adapter.rank=", "or other adapter.targets"),
    "the ratio of another method": Case(ALONG % "rate_ratio: 16", "adapter.rate_ratio", "unknown key"),
    "experts": Case(ALONG % "experts: true", "adapter.experts", "unknown key"),
    "PEFT's spelling": Case("check my.yaml 'adapter={method: lora_ga}'", "adapter.method", "lora-ga"),
    "gradients in pieces": Case(ALONG % "rank: 2" + " distributed.zero=2", "lora-ga looks at gradients", "zero=0"),
    "rows of a method that reads none": Case("check my.yaml adapter.rows=8", "adapter.rows", "unknown key"),
    "a loss that compares rows": Case(
        ALONG % "rank: 2" + " recipe=embed data.loss_on=all",
        "lora-ga looks at the loss of single rows",
        "Write adapter.method=lora",
    ),
    "no answers yet": Case(
        ALONG % "rank: 2" + " recipe=reinforce 'rewards=[{kind: number}]'",
        "lora-ga looks at the loss of rows before the training",
        "Write adapter.method=lora",
    ),
    "a bank of peers": Case(
        "run my.yaml 'adapter={method: lora-ga, rank: 2}' recipe=distill distill.peers=2",
        "a bank holds no lora-ga",
        "lora",
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_message_says_where_and_what_to_write(case: Case, assert_refused: AssertRefused) -> None:
    assert_refused(case)
