"""Mistakes in how devices share a run: refused before a weight is read, with the cure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.mistakes.cases import Case, assert_refused, file

ZERO2, ZERO3 = "distributed.zero=2", "distributed.zero=3"
OWN, CUT = "ds.json", "cut.json"
CASES = {
    "8 bits in shares": (
        f"{ZERO3} model.weights=int8",
        "model.weights=int8 with zero=3",
        "Write model.weights=nf4, which can be cut, or distributed.zero=2",
    ),
    "8 bits in shares of torch": (f"{ZERO2} distributed.engine=fsdp2 model.weights=int8", "model.weights=int8", "nf4"),
    "8 bits in shares of a file": (f"distributed.deepspeed={CUT} model.weights=int8", "model.weights=int8", "nf4"),
    "4 bits in shares, looked at": (
        f"{ZERO3} model.weights=nf4 'adapter={{method: dora}}'",
        "adapter.method=dora takes norms of weights past their layers",
        "Write distributed={engine: fsdp2, zero: 3}, or distributed.zero=2",
    ),
    "one bank for blocks in shares": (
        f"{ZERO3} 'adapter={{method: vb-lora}}'",
        "adapter.method=vb-lora has one bank of vectors for all blocks",
        "Write distributed.zero=2",
    ),
    "experts in shares": (
        f"{ZERO3} 'adapter={{method: lora, experts: true}}'",
        "adapter.experts computes past the layers that hold its updates",
        "Write distributed={engine: fsdp2, zero: 3}, or distributed.zero=2",
    ),
    "rewards in shares": (
        f"{ZERO3} recipe=reinforce",
        "recipe=reinforce writes with the whole model, and zero=3 and fsdp2 cut it",
        "Write distributed.zero=2",
    ),
    "no stage of torch": (
        "distributed.engine=fsdp2 distributed.zero=1",
        "engine=fsdp2 shares what zero=2 or zero=3 does",
        "zero is 1",
    ),
    "half in the host's memory": (
        f"{ZERO3} distributed.engine=fsdp2 distributed.offload_parameters=cpu",
        "engine=fsdp2 leaves weights and the optimizer in the host's memory together",
        "or neither",
    ),
    "disk of torch": (
        f"{ZERO3} distributed.engine=fsdp2 distributed.offload_optimizer=nvme distributed.nvme=.",
        "in the host's memory only",
        "Write cpu",
    ),
    "a member in shares": (
        f"{ZERO2} recipe=sweep 'sweep.over={{optimizer.name: [adamw, muon]}}' evaluate.every=0.5",
        "optimizer.name=muon goes with whole weights",
        "Write optimizer.name=adamw",
    ),
    "no disk": (
        f"{ZERO3} distributed.offload_optimizer=nvme distributed.nvme=/no/such",
        "distributed.nvme=/no/such: no such folder",
        "Make it",
    ),
    "nowhere to write": (f"{ZERO3} distributed.offload_optimizer=nvme", "distributed", "Write nvme=FOLDER"),
    "weights elsewhere without shares": (
        f"{ZERO2} distributed.offload_parameters=cpu",
        "offload_parameters=cpu needs zero=3",
        "zero=3",
    ),
    "stage": ("distributed.zero=4", "distributed.zero", "found 4"),
    "optimizer of whole matrices": (
        f"{ZERO2} optimizer.name=muon",
        "optimizer.name=muon",
        "Write optimizer.name=adamw",
    ),
    "average": (
        f"{ZERO2} average.method=ema evaluate.every=0.5",
        "average.method=ema goes with whole weights",
        "Write average.method=none",
    ),
    "sharpness": (f"{ZERO2} optimizer.sam=0.05", "optimizer.sam", "distributed.zero=0"),
    "method that looks at gradients": (
        f"{ZERO2} 'adapter={{method: adalora}}'",
        "adapter.method=adalora",
        "distributed.zero=0",
    ),
    "moving freeze": (f"{ZERO2} freeze.policy=lisa", "freeze.policy=lisa", "policy=static with distributed.zero=2"),
    "frozen blocks that are cut": (
        f"{ZERO3} 'adapter={{method: linear-probe}}' freeze.cache=memory",
        "freeze.cache=memory runs frozen blocks by themselves",
        "Write freeze.cache=off",
    ),
    "file that contradicts": (f"distributed.deepspeed={OWN}", "optimizer: the recipe says it", "Leave these out"),
    "file that is none": ("distributed.deepspeed=none.json", "none.json cannot be read", "Write the path"),
    "file and settings": (f"distributed.deepspeed={OWN} {ZERO2}", "says everything itself", "Leave out zero"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_told(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, place, cure = CASES[name]
    contradicting = file(OWN, json.dumps({"zero_optimization": {"stage": 2}, "optimizer": {"type": "Adam"}}))
    cutting = file(CUT, json.dumps({"zero_optimization": {"stage": 3}}))

    def prepare(where: Path) -> None:
        contradicting(where)
        cutting(where)

    for verb in (f"run my.yaml {words} --out new", f"check my.yaml {words}"):
        assert_refused(Case(verb, place, cure, prepare), folder, monkeypatch, capsys)
