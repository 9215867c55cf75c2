"""Mistakes with `train.kernels` end in status 2, with place and cure."""

from __future__ import annotations

import pytest

from tests.mistakes.cases import SUMS, AssertRefused, Case

LIGER = "check my.yaml train.kernels=liger"
CASES = {
    "a peer's name": Case("check my.yaml train.use_liger_kernel=true", "unknown key", "train"),
    "no such kernels": Case("check my.yaml train.kernels=unsloth", "train.kernels", "liger"),
    "compiled": Case(f"{LIGER} train.compile=true", "train.compile writes its own", "train.compile=false"),
    "noted operations": Case(f"{LIGER} train.checkpointing=elementwise", "overwrites", "train.checkpointing=true"),
    "weights in shares": Case(f"{LIGER} distributed.zero=3", "weights that devices share", "distributed={zero: 2}"),
    "rounded weights under an adapter": Case(
        "check my.yaml train.rounded=int4", "adapter.method=lora others", "adapter.method=full"
    ),
    "rounded weights in shares": Case(
        "check my.yaml train.rounded=int4 adapter.method=full distributed.zero=2", "devices share", "Leave distributed"
    ),
    "other bits": Case("check my.yaml train.rounded=int8 adapter.method=full", "train.rounded", "int4"),
    "no accelerator": Case(LIGER, "computes on its CPU", "train.kernels=auto", SUMS),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_message_says_where_and_what_to_write(case: Case, assert_refused: AssertRefused) -> None:
    assert_refused(case)
