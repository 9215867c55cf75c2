"""Mistakes with section `grow` end in status 2, with place and cure."""

from __future__ import annotations

import pytest

from tests.mistakes.cases import SUMS, AssertRefused, Case

ON = "check my.yaml 'adapter={method: full}' grow.at=[0.5] grow.factor=5"
CASES = {
    "an adapter": Case("check my.yaml grow.at=[0.5]", "adapter.method=lora", "adapter.method=block-expansion"),
    "in percent": Case("check my.yaml grow.at=[50]", "grow.at", "less than or equal to 0.9"),
    "at once": Case("check my.yaml grow.at=[0]", "grow.at", "greater than 0"),
    "at the end": Case("check my.yaml grow.at=1.0", "grow.at", "less than or equal to 0.9"),
    "backwards": Case("check my.yaml grow.at=[0.5,0.2]", "grow.at", "in rising order"),
    "by nothing": Case("check my.yaml grow.at=[0.5] grow.factor=1", "grow.factor", "greater than or equal to 2"),
    "a peer's name": Case("check my.yaml grow.blocks=3", "unknown key", "at"),
    "a factor alone": Case("check my.yaml grow.factor=4", "grow.at is empty", "Write grow.at=[0.5]"),
    "blocks that cannot be halved": Case(
        "check my.yaml 'adapter={method: full}' grow.at=[0.5]", "the backbone has 5", "Write grow.factor=5"
    ),
    "blocks that cannot be halved twice": Case(
        "check my.yaml 'adapter={method: full}' grow.at=[0.2,0.5]", "the backbone has 5", "grow.at=[0.3]"
    ),
    "too few steps": Case(
        f"{ON.replace('check', 'run').replace('0.5', '0.8')}", "of 2 steps none begins", "Write grow.at=[0.5]"
    ),
    "pruned": Case(f"{ON} adapter.sparsity=0.5", "keeps at zero", "Leave adapter.sparsity out"),
    "frozen": Case(f"{ON} freeze.policy=gradual", "both say which blocks train", "Write freeze.policy=none"),
    "dropped": Case(f"{ON} layer_drop.rate=0.5", "layer_drop both thin out", "Leave layer_drop out"),
    "dropped tokens": Case(f"{ON} token_drop.keep=0.5", "token_drop both thin out", "Leave token_drop out"),
    "dropped by rows": Case(f"{ON} regularise.stochastic_depth=0.1", "by their number", "Leave regularise"),
    "compiled": Case(f"{ON} train.compile=true", "train.compile", "Write train.compile=false"),
    "an optimizer that remembers": Case(f"{ON} optimizer.name=soap", "optimizer.name=soap", "optimizer.name=adamw"),
    "slow weights": Case(f"{ON} optimizer.lookahead=5", "optimizer.lookahead", "Leave optimizer.lookahead out"),
    "an anchor": Case(f"{ON} optimizer.l2_start=0.1", "optimizer.l2_start", "Leave optimizer.l2_start out"),
    "mixed with the start": Case(f"{ON} regularise.mixout=0.3", "mixout goes back to", "Leave regularise.mixout out"),
    "averaged": Case(f"{ON} average.method=ema evaluate.every=1", "average.method=ema", "average.method=none"),
    "ended early": Case(f"{ON} evaluate.patience=2 evaluate.every=1", "evaluate.patience", "Leave evaluate.patience"),
    "in pieces": Case(f"{ON} distributed.zero=2", "grow goes with whole weights", "zero=0"),
    "quantised": Case(f"{ON} model.weights=nf4", "model.weights", "bfloat16"),
    "judged answers": Case(f"{ON} recipe=prefer", "recipe=prefer", "Write recipe=sft"),
    "folds": Case(f"{ON} recipe=crossval of=classify", "recipe=crossval", "Write recipe=classify"),
    "members that differ": Case(
        f"{ON} recipe=sweep evaluate.every=1 of=sft 'sweep.over={{grow.at: [[0.2], [0.5]]}}'",
        "grow.at",
        "Write it beside the sweep",
        SUMS,
    ),
    "members that are stopped": Case(
        f"{ON} recipe=search evaluate.every=1 of=sft "
        "'search.space={train.learning_rate: {low: 1e-4, high: 1e-2, log: true}}'",
        "a search stops members early",
        "Leave it out",
        SUMS,
    ),
    "blocks that a teacher compares": Case(
        f"{ON} recipe=distill distill.teacher.id=stories 'distill.match=[{{what: hidden_mse}}]'",
        "distill.match",
        "Leave one out",
    ),
    "answers of a student that grows": Case(
        f"{ON} recipe=distill distill.teacher.id=stories distill.on_policy.share=0.5",
        "distill.on_policy",
        "Leave one of them out",
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_message_says_where_and_what_to_write(case: Case, assert_refused: AssertRefused) -> None:
    assert_refused(case)
