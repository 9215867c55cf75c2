"""Mistakes with section `distributed` end in status 2 and a message with place and cure, before training."""

from __future__ import annotations

import pytest

from tests.mistakes.cases import AssertRefused, Case

PARTS = "check my.yaml distributed.sequence=2"
CUT = "check my.yaml distributed.tensor=2"
STAGES = "my.yaml distributed.pipeline=2 evaluate.answers=0"
CASES = {
    "no such key": Case("check my.yaml distributed.sequences=2", "distributed.sequences", "Did you mean `sequence`?"),
    "no device": Case("check my.yaml distributed.sequence=0", "distributed.sequence", "greater than 0"),
    "one device": Case("run my.yaml distributed.sequence=2", "groups of 2 devices, and there is one", "--devices 2"),
    "stages of one device": Case(f"run {STAGES}", "groups of 2 devices, and there is one", "--devices 2"),
    "stages of shares": Case(f"check {STAGES} distributed.zero=2", "pipeline=2 gives each device", "Leave out zero"),
    "a plan of stages of one device": Case(f"plan {STAGES}", "groups of 2 devices, and there is one", "--devices 2"),
    "copies of deepspeed": Case(
        "check my.yaml distributed.zero=3 distributed.replicas=2", "replicas=2 copies", "fsdp2 and distributed.zero=3"
    ),
    "copies on one device": Case(
        "run my.yaml 'distributed={engine: fsdp2, zero: 3, replicas: 2}'", "distributed.replicas=2", "--devices 4"
    ),
    "a DeepSpeed of one's own, and more": Case(
        "check my.yaml distributed.deepspeed=ds.json distributed.sequence=2",
        "says everything itself",
        "Leave out sequence",
    ),
    "heads": Case("check my.yaml distributed.sequence=3", "stories has 8, with 4 of keys", "sequence=2|4"),
    "rows by classes": Case(f"{PARTS} recipe=classify", "not tried with rows in parts", "Write recipe=sft"),
    "pairs": Case(f"{PARTS} recipe=prefer", "recipe=prefer, which was not tried", "distributed.sequence=1"),
    "another kernel": Case(f"{PARTS} model.attention=eager", "model.attention=eager", "model.attention=sdpa"),
    "virtual tokens": Case(f"{PARTS} adapter.method=prefix", "adapter.method=prefix", "adapter.method=lora"),
    "frozen layers": Case(
        f"{PARTS} freeze.policy=static freeze.layers=1", "freeze.policy=static", "freeze.policy=none"
    ),
    "dropout": Case(f"{PARTS} adapter.dropout=0.1", "adapter.dropout draws", "adapter.dropout=0"),
    "noise of a method": Case(f"{PARTS} adapter.method=pvera", "adapter.method=pvera draws", "adapter.method=lora"),
    "noise": Case(f"{PARTS} regularise.neftune=5", "regularise draws", "regularise={}"),
    "labels that are drawn": Case(f"{PARTS} optimizer.name=sophia", "optimizer.name=sophia", "optimizer.name=adamw"),
    "compiled": Case(f"{PARTS} train.compile=true", "train.compile does not know", "train.compile=false"),
    "losses of rows": Case(
        f"{PARTS} data.sampling.by=selective",
        "data.sampling.by=selective",
        "data.sampling={}, or distributed.sequence=1",
    ),
    "dynamics": Case(f"{PARTS} evaluate.dynamics=true", "evaluate.dynamics", "evaluate.dynamics=false"),
    "cut blocks on one device": Case(
        "run my.yaml distributed.tensor=2", "tensor=2 makes groups of 2 devices, and there is one", "--devices 2"
    ),
    "an invocation in shares": Case(
        "check my.yaml adapter.method=alora distributed.zero=2",
        "alora was not tried with ZeRO",
        "Write adapter.method=lora",
    ),
    "cut blocks and cut weights": Case(f"{CUT} distributed.zero=3", "was not tried with zero=3", "Leave zero out"),
    "cut blocks and copies": Case(
        f"{CUT} distributed.engine=fsdp2 distributed.zero=3", "zero=3, engine=fsdp2", "Leave zero and engine out"
    ),
    "cut blocks and parts of rows": Case(
        f"{CUT} distributed.sequence=2", "was not tried with sequence=2", "or write distributed.tensor=1"
    ),
    "heads of cut blocks": Case(
        "check my.yaml distributed.tensor=3", "has 8, with 4 of keys", "distributed.tensor=2|4"
    ),
    "answers of cut blocks": Case(f"{CUT} recipe=reinforce", "which writes with the whole model", "Write recipe="),
    "cut blocks under another method": Case(f"{CUT} adapter.method=ia3", "adapter.method=ia3", "adapter.method=lora"),
    "cut blocks that are packed": Case(f"{CUT} model.weights=nf4", "model.weights=nf4", "model.weights=bfloat16"),
    "cut blocks of another kernel": Case(f"{CUT} model.attention=eager", "model.attention=eager", "attention=sdpa"),
    "cut blocks and new tokens": Case(f"{CUT} model.new_tokens=[<a>]", "model.new_tokens", "model.new_tokens=[]"),
    "dropout in cut blocks": Case(f"{CUT} adapter.dropout=0.1", "adapter.dropout draws", "adapter.dropout=0"),
    "noise in cut blocks": Case(f"{CUT} regularise.neftune=5", "with regularise", "regularise={}"),
    "whole matrices of cut blocks": Case(f"{CUT} optimizer.name=muon", "optimizer.name=muon", "optimizer.name=adamw"),
    "two gradients of cut blocks": Case(f"{CUT} optimizer.sam=0.1", "optimizer.sam", "optimizer.sam=null"),
    "average of cut blocks": Case(f"{CUT} average.method=ema", "average.method=ema", "average.method=none"),
    "frozen cut blocks": Case(f"{CUT} freeze.policy=static freeze.layers=1", "freeze.policy=static", "policy=none"),
    "compiled cut blocks": Case(f"{CUT} train.compile=true", "with train.compile", "train.compile=false"),
    "left out cut blocks": Case(f"{CUT} layer_drop.rate=0.2", "layer_drop", "layer_drop={}"),
    "rows that losses of cut blocks choose": Case(
        f"{CUT} data.sampling.by=selective", "data.sampling.by=selective", "data.sampling={}, or distributed.tensor=1"
    ),
    "tokens of a part": Case(
        f"{PARTS} batch.tokens_per_device=4", "of which each of 2 devices computes", "Raise it to"
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_message_says_where_and_what_to_write(case: Case, assert_refused: AssertRefused) -> None:
    assert_refused(case)
