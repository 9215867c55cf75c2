"""Mistakes with how rows lie end in status 2 and a message with place and cure, before training."""

from __future__ import annotations

import pytest

from tests.mistakes.cases import AssertRefused, Case

ON = "check my.yaml batch.packing=true"
SHARE = "check my.yaml batch.shared_prefix=true"
CASES = {
    "no such choice": Case("check my.yaml batch.packing=always", "batch.packing", "auto"),
    "own answers": Case(f"{ON} recipe=reinforce", "recipe=reinforce trains on padded rows", "batch.packing=auto"),
    "layers of a teacher": Case(
        f"{ON} recipe=distill distill.teacher.id=backbone 'distill.match=[{{what: hidden_mse}}]'",
        "compares the layers of padded rows",
        "batch.packing=auto, or leave that out",
    ),
    "members with another kernel": Case(
        f"{ON} recipe=sweep sweep.over.seed=[0,1] evaluate.every=4 model.attention=eager",
        "model.attention=eager",
        "model.attention=auto",
    ),
    "packing in a sweep": Case(
        "check my.yaml recipe=sweep sweep.over.batch.packing=[true,false]", "never changes the result", "Leave it"
    ),
    "virtual tokens": Case(
        f"{ON} adapter.method=prefix", "virtual tokens of its own", "batch.packing=auto, or adapter.method=lora"
    ),
    "prompts": Case(f"{ON} adapter.method=prompt", "virtual tokens of its own", "adapter.method=lora"),
    "another kernel": Case(f"{ON} model.attention=eager", "model.attention=eager", "model.attention=auto"),
    "noise": Case(f"{ON} regularise.neftune=5", "draw their noise for padded rows", "leave the two out"),
    "compiled": Case(f"{ON} train.compile=true", "compile again for each combination", "train.compile=false"),
    "cut weights": Case(f"{ON} distributed.zero=3", "weights that are whole", "distributed.zero=0"),
    "no such sharing": Case("check my.yaml batch.shared_prefix=always", "batch.shared_prefix", "auto"),
    "sharing by an encoder": Case(f"{SHARE} recipe=mlm", "recipe=mlm", "batch.shared_prefix=auto"),
    "sharing in padded rows": Case(
        f"{SHARE} batch.packing=false", "batch.packing=false forbids it", "batch.packing=auto"
    ),
    "sharing with dropout": Case(f"{SHARE} adapter.dropout=0.1", "draws for each row", "adapter.dropout=0"),
    "sharing with noise": Case(f"{SHARE} adapter.method=pvera", "adapter.method=pvera draws", "adapter.method=lora"),
    "sharing with labels that are drawn": Case(
        f"{SHARE} optimizer.name=sophia", "optimizer.name=sophia draws", "optimizer.name=adamw"
    ),
    "sharing with another kernel": Case(f"{SHARE} model.attention=eager", "attention=eager", "model.attention=auto"),
    "sharing in a sweep": Case(
        "check my.yaml recipe=sweep sweep.over.batch.shared_prefix=[true,false]", "never changes the result", "Leave it"
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_message_says_where_and_what_to_write(case: Case, assert_refused: AssertRefused) -> None:
    assert_refused(case)
