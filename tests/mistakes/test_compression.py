"""Mistakes with section `distributed.compression` end in status 2, with place and cure, before training."""

from __future__ import annotations

import pytest

from tests.mistakes.cases import AssertRefused, Case, file

LONG = "check my.yaml train.steps=1000"
LOW_RANK = f"{LONG} distributed.compression.gradients=powersgd"
HALF = f"{LONG} distributed.compression.gradients=float16"
SHARED = f"{LONG} 'distributed={{engine: fsdp2, zero: 3, compression: {{%s}}}}'"
QUANTISED = '{"zero_optimization": {"stage": 3, "zero_quantized_%s": true}}'
OWN = "check my.yaml distributed.deepspeed=ds.json"
CASES = {
    "no such key": Case(f"{LONG} distributed.compression.gradient=powersgd", "compression.gradient", "`gradients`"),
    "no such kind": Case(f"{LONG} distributed.compression.gradients=int3", "compression.gradients", "'powersgd'"),
    "int8 sums": Case(f"{LONG} distributed.compression.gradients=int8", "no int8 sums", "gradients=powersgd"),
    "1-bit Adam": Case(f"{LONG} distributed.compression.gradients=onebit", "no 1-bit", "gradients=powersgd"),
    "nothing to do": Case(
        f"{LONG} distributed.compression.warm_up=9", "warm_up would change nothing", "gradients=powersgd"
    ),
    "no warm-up": Case(f"{LOW_RANK} distributed.compression.warm_up=0", "after 2 steps or more", "warm_up=2"),
    "one device": Case(
        "run my.yaml train.steps=1000 distributed.compression.gradients=bfloat16",
        "between devices, and there is one",
        "Write --devices 2",
    ),
    "DDP's bfloat16 without NCCL": Case(
        f"{LONG} distributed.compression.gradients=bfloat16", "needs accelerators", "compression.gradients=float16"
    ),
    "all is warm-up": Case(
        f"{LOW_RANK} train.steps=50", "warm_up=100 is all of train.steps=50", "distributed.compression.warm_up=5"
    ),
    "low rank of a part": Case(
        SHARED % "gradients: powersgd", "is of whole gradients, and fsdp2", "compression.gradients=bfloat16"
    ),
    "weights that all hold": Case(
        f"{LONG} distributed.compression.weights=int8", "compression.weights=int8 is a part", "distributed.zero=3"
    ),
    "ZeRO++ of another engine": Case(SHARED % "gradients: int4", "gradients=int4 is a part", "engine=deepspeed"),
    "weights of ZeRO++": Case(
        f"{LONG} 'distributed={{zero: 3, compression: {{weights: int8}}}}'",
        "zero_quantized_weights of ZeRO++ needs DeepSpeed's kernels",
        "Write distributed.compression.weights=none",
    ),
    "gradients of ZeRO++": Case(
        f"{LONG} 'distributed={{zero: 3, compression: {{gradients: int4}}}}'",
        "zero_quantized_gradients of ZeRO++ needs DeepSpeed's kernels",
        "Write distributed.compression.gradients=bfloat16",
    ),
    "a DeepSpeed of one's own, and more": Case(
        f"{OWN} distributed.compression.gradients=bfloat16",
        "says everything itself",
        "Leave out compression",
        file("ds.json", QUANTISED % "weights"),
    ),
    "DeepSpeed's own weights": Case(
        OWN,
        "zero_quantized_weights of ZeRO++ needs",
        "Leave zero_quantized_weights out",
        file("ds.json", QUANTISED % "weights"),
    ),
    "DeepSpeed's own gradients": Case(
        OWN,
        "zero_quantized_gradients of ZeRO++ needs",
        "Leave zero_quantized_gradients out",
        file("ds.json", QUANTISED % "gradients"),
    ),
    "two sums a step": Case(f"{LOW_RANK} optimizer.sam=0.05", "optimizer.sam adds up gradients", "Leave it out"),
    "curvature": Case(
        f"{LOW_RANK} optimizer.name=sophia", "optimizer.name=sophia adds up", "Write optimizer.name=adamw"
    ),
    "layers that end": Case(
        f"{HALF} freeze.policy=autofreeze", "freeze.policy=autofreeze changes which", "freeze.policy=static"
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_message_says_where_and_what_to_write(case: Case, assert_refused: AssertRefused) -> None:
    assert_refused(case)
