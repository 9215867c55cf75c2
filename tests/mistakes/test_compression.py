"""Mistakes with section `distributed.compression` end in status 2, with place and cure, before training."""

from __future__ import annotations

import pytest

from tests.mistakes.cases import AssertRefused, Case, file

LONG = "check my.yaml train.steps=1000"
ONE_BIT = f"{LONG} distributed.compression.gradients=onebit"
INT8 = f"{LONG} distributed.compression.gradients=int8"
SHARED = f"{LONG} 'distributed={{engine: fsdp2, zero: 3, compression: {{%s}}}}'"
QUANTISED = '{"zero_optimization": {"stage": 3, "zero_quantized_%s": true}}'
OWN = "check my.yaml distributed.deepspeed=ds.json"
CASES = {
    "no such key": Case(f"{LONG} distributed.compression.gradient=int8", "compression.gradient", "`gradients`"),
    "no such code": Case(f"{LONG} distributed.compression.gradients=int4", "compression.gradients", "'int8'"),
    "nothing to do": Case(
        f"{LONG} distributed.compression.warm_up=9", "warm_up would change nothing", "gradients=int8"
    ),
    "half a byte": Case(f"{INT8} distributed.compression.block=12", "compression.block", "multiple of 8"),
    "one device": Case(
        "run my.yaml train.steps=1000 distributed.compression.gradients=int8",
        "between devices, and there is one",
        "Write --devices 2",
    ),
    "all is warm-up": Case(
        f"{INT8} train.steps=50", "warm_up=100 is all of train.steps=50", "distributed.compression.warm_up=10"
    ),
    "DeepSpeed's shares": Case(f"{INT8} distributed.zero=2", "zero_quantized_gradients", "Write engine=fsdp2"),
    "weights that all hold": Case(
        f"{LONG} distributed.compression.weights=int8", "compression.weights=int8 is of", "engine=fsdp2 and zero=3"
    ),
    "one bit of a share": Case(SHARED % "gradients: onebit", "engine=fsdp2 cuts them", "compression.gradients=int8"),
    "codes of codes": Case(
        SHARED % "weights: int8" + " model.weights=nf4", "model.weights=nf4 travels as codes already", "Leave it out"
    ),
    "a DeepSpeed of one's own, and more": Case(
        f"{OWN} distributed.compression.gradients=int8",
        "says everything itself",
        "Leave out compression",
        file("ds.json", QUANTISED % "weights"),
    ),
    "DeepSpeed's own weights": Case(
        OWN, "zero_quantized_weights needs DeepSpeed's kernels", "weights: int8", file("ds.json", QUANTISED % "weights")
    ),
    "DeepSpeed's own gradients": Case(
        OWN,
        "zero_quantized_gradients needs DeepSpeed's kernels",
        "gradients: int8",
        file("ds.json", QUANTISED % "gradients"),
    ),
    "another optimizer": Case(f"{ONE_BIT} optimizer.name=lion", "optimizer.name=adamw|sgd, not lion", "or int8"),
    "no warm-up": Case(f"{ONE_BIT} distributed.compression.warm_up=0", "learns second moments", "warm_up=100"),
    "penalties": Case(f"{ONE_BIT} optimizer.l2=0.1", "optimizer.l2 changes gradients", "Leave it out"),
    "ranks that move": Case(f"{ONE_BIT} adapter.method=adalora", "adalora looks at gradients", "gradients=int8"),
    "two sums a step": Case(f"{INT8} optimizer.sam=0.05", "optimizer.sam adds up gradients", "Leave it out"),
    "curvature": Case(f"{INT8} optimizer.name=sophia", "optimizer.name=sophia adds up", "Write optimizer.name=adamw"),
    "layers that end": Case(
        f"{INT8} freeze.policy=autofreeze", "freeze.policy=autofreeze ends", "freeze.policy=static"
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_message_says_where_and_what_to_write(case: Case, assert_refused: AssertRefused) -> None:
    assert_refused(case)
