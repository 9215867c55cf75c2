"""Mistakes with sections `layer_drop` and `token_drop` end in status 2, with place and cure."""

from __future__ import annotations

import pytest

from tests.mistakes.cases import SUMS, AssertRefused, Case

ON = "check my.yaml layer_drop.rate=0.5"
TOKENS = "check my.yaml token_drop.keep=0.5"
CASES = {
    "every block": Case("check my.yaml layer_drop.rate=1", "layer_drop.rate", "less than 1"),
    "in percent": Case("check my.yaml layer_drop.rate=50", "layer_drop.rate", "less than 1"),
    "a peer's name": Case("check my.yaml layer_drop.theta=0.5", "unknown key", "rate"),
    "unknown rates": Case("check my.yaml layer_drop.rates=linear", "layer_drop.rates", "deeper"),
    "a ramp that stands still": Case(f"{ON} layer_drop.ramp=0", "layer_drop.ramp", "greater than 0"),
    "outputs that change": Case(
        f"{ON} freeze.policy=static freeze.layers=0.5 freeze.cache=memory", "freeze.cache=memory", "freeze.cache=off"
    ),
    "a policy that goes by gradients": Case(f"{ON} freeze.policy=autofreeze", "goes by gradients", "freeze.policy"),
    "compiled blocks": Case(f"{ON} train.compile=true", "train.compile", "Write train.compile=false"),
    "twice": Case(f"{ON} regularise.stochastic_depth=0.1", "stochastic_depth", "Leave regularise.stochastic_depth out"),
    "a teacher": Case(f"{ON} recipe=distill distill.teacher.id=backbone", "would lose as much", "Leave it out"),
    "in pieces": Case(f"{ON} distributed.zero=2", "layer_drop goes with whole weights", "zero=0"),
    "all tokens": Case("check my.yaml token_drop.keep=0", "token_drop.keep", "greater than 0"),
    "more than all tokens": Case("check my.yaml token_drop.keep=50", "token_drop.keep", "less than or equal to 1"),
    "growing for ever": Case(f"{TOKENS} token_drop.until=2", "token_drop.until", "less than or equal to 1"),
    "no outer blocks": Case(f"{TOKENS} token_drop.outer=0", "token_drop.outer", "greater than 0"),
    "no middle": Case(f"{TOKENS} token_drop.outer=3", "none is left in the middle", "Leave token_drop out"),
    "both": Case(f"{TOKENS} layer_drop.rate=0.5", "thin out the same blocks", "Leave one of them out"),
    "tokens of a prompt": Case(
        f"{TOKENS} 'adapter={{method: prompt}}'", "adapter.method=prompt puts others", "adapter.method=lora"
    ),
    "a kernel that counts": Case(
        f"{TOKENS} model.attention=flex_attention", "counts tokens", "Write model.attention=sdpa"
    ),
    "tokens in one sequence": Case(f"{TOKENS} batch.packing=true", "drops tokens of padded rows", "batch.packing=auto"),
    "outputs of other tokens": Case(
        f"{TOKENS} freeze.policy=static freeze.layers=0.5 freeze.cache=disk", "freeze.cache=disk", "freeze.cache=off"
    ),
    "compiled tokens": Case(f"{TOKENS} train.compile=true", "train.compile", "Write train.compile=false"),
    "a teacher's tokens": Case(f"{TOKENS} recipe=distill distill.teacher.id=backbone", "would lose as much", "Leave"),
    "judged answers": Case(f"{TOKENS} recipe=prefer", "compares them as they are", "leave token_drop out"),
    "tokens in pieces": Case(f"{TOKENS} distributed.zero=2", "token_drop goes with whole weights", "zero=0"),
    "members that differ": Case(
        f"{ON} recipe=sweep of=sft 'sweep.over={{layer_drop.rate: [0.1, 0.5]}}'",
        "layer_drop.rate",
        "Write it beside the sweep",
        SUMS,
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_message_says_where_and_what_to_write(case: Case, assert_refused: AssertRefused) -> None:
    assert_refused(case)
