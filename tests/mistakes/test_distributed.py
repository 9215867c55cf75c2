"""Mistakes with section `distributed` end in status 2 and a message with place and cure, before training."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mistakes.cases import Case, assert_refused

PARTS = "check my.yaml distributed.sequence=2"
CASES = {
    "no such key": Case("check my.yaml distributed.sequences=2", "distributed.sequences", "Did you mean `sequence`?"),
    "no device": Case("check my.yaml distributed.sequence=0", "distributed.sequence", "greater than 0"),
    "one device": Case("run my.yaml distributed.sequence=2", "groups of 2 devices, and there is one", "--devices 2"),
    "copies of deepspeed": Case(
        "check my.yaml distributed.zero=3 distributed.replicas=2", "replicas=2 copies", "Write engine=fsdp2 and zero=3"
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
    "rows by classes": Case(f"{PARTS} recipe=classify", "recipe=classify reads", "Write recipe=sft"),
    "pairs": Case(f"{PARTS} recipe=prefer", "recipe=prefer reads", "distributed.sequence=1"),
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
    "tokens of a part": Case(
        f"{PARTS} batch.tokens_per_device=4", "of which each of 2 devices computes", "Raise it to"
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_message_says_where_and_what_to_write(
    case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(case, folder, monkeypatch, capsys)
