"""Mistakes with `train.mlp_tile` and `train.offload_activations` end in status 2, with place and cure."""

from __future__ import annotations

import pytest

from tests.mistakes.cases import SUMS, AssertRefused, Case

TILE = "check my.yaml train.mlp_tile=64"
AWAY = "check my.yaml train.offload_activations=true"
AGAIN = f"{AWAY} train.checkpointing=true"
CASES = {
    "no tile": Case("check my.yaml train.mlp_tile=0", "train.mlp_tile", "greater than 0"),
    "a peer's name": Case("check my.yaml train.tiled_mlp=true", "unknown key", "mlp_tile"),
    "compiled": Case(f"{TILE} train.compile=true", "train.compile compiles them whole", "train.mlp_tile=auto"),
    "an invocation": Case(f"{TILE} 'adapter={{method: alora}}'", "begins at a place", "train.mlp_tile=auto"),
    "weights in shares": Case(f"{TILE} distributed.zero=3", "fetch a weight equally often", "distributed.engine=fsdp2"),
    "tiles of stages": Case(f"{TILE} distributed.pipeline=2", "stretches of them", "distributed={zero: 2}"),
    "inputs that nobody keeps": Case(AWAY, "computed again", "train.checkpointing=true"),
    "inputs of stages": Case(f"{AGAIN} distributed.pipeline=2", "stretches of them", "distributed={zero: 2}"),
    "no other memory": Case(AGAIN, "computes on a CPU", "train.offload_activations=auto", SUMS),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_message_says_where_and_what_to_write(case: Case, assert_refused: AssertRefused) -> None:
    assert_refused(case)
