"""Mistakes with section `layer_drop` end in status 2 and a message with place and cure, before training."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mistakes.cases import Case, assert_refused, lines

ON = "check my.yaml layer_drop.rate=0.5"
ROWS = lines([{"question": f"How much is {n} and {n}?", "answer": f"{2 * n}."} for n in range(40)], "rows.jsonl")
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
    "a teacher": Case(f"{ON} recipe=distill distill.teacher.id=backbone", "would lose them too", "Leave it out"),
    "in pieces": Case(f"{ON} distributed.zero=2", "layer_drop leaves out blocks", "zero=0"),
    "members that differ": Case(
        f"{ON} recipe=sweep sweep.of=sft 'sweep.over={{layer_drop.rate: [0.1, 0.5]}}'",
        "layer_drop.rate",
        "Write it beside the sweep",
        ROWS,
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_message_says_where_and_what_to_write(
    case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(case, folder, monkeypatch, capsys)
