"""Mistakes with section `search` end in status 2 and a message with place and cure, before training."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mistakes.cases import Case, assert_refused, refusal

RATE = "search.space.train.learning_rate='{low: 1e-4, high: 1e-2, log: true}'"
BARE = "check my.yaml recipe=search evaluate.every=0.5 train.steps=30"
ON = f"{BARE} {RATE}"
CASES = {
    "no space": Case(BARE, "search.space", "needs a key, such as {train.learning_rate: {low: 1.0e-4"),
    "nothing to compare": Case(
        f"check my.yaml recipe=search train.steps=30 {RATE}", "evaluate.every", "Write evaluate"
    ),
    "beside another recipe": Case(f"check my.yaml {RATE}", "search is for recipe=search", "Leave search out"),
    "a key that is none": Case(
        f"{ON} search.space.adapter.rnk=[2,4]", "search.space.adapter.rnk: unknown key", "Did you mean `adapter.rank`?"
    ),
    "a section": Case(f"{ON} search.space.adapter=[2,4]", "search.space.adapter: is a section", "such as adapter."),
    "one value": Case(
        f"{ON} search.space.adapter.rank=4", "search.space.adapter.rank", "expected values such as [a, b]"
    ),
    "no value": Case(f"{ON} search.space.adapter.rank=[]", "search.space.adapter.rank", "Write values"),
    "several backbones": Case(
        f"{ON} search.space.model.id=[stories,other]", "search.space.model.id", "Run a search for each value"
    ),
    "a key that one method lacks": Case(
        f"{ON} search.space.adapter.method=[lora,ia3] search.space.adapter.rank=[2,4]",
        "search.space.adapter.rank: ia3 has no rank",
        "leave ia3 out of adapter.method, or write `adapter.rank` beside, with one value",
    ),
    "a key that no method has": Case(
        f"{ON} search.space.adapter.method=[ia3,houlsby] search.space.adapter.widht=[2,4]",
        "search.space.adapter.widht: no method of adapter.method has such a key",
        "Did you mean `width`?",
    ),
    "a method that is none": Case(
        f"{ON} search.space.adapter.method=[lora,ia4]", "search.space.adapter.method: unknown method 'ia4'", "ia3"
    ),
    "other rows": Case(f"{ON} search.space.data.limit=[5,10]", "search.space.data.limit", "the same held-out rows"),
    "the luckiest seed": Case(f"{ON} search.space.seed=[0,1]", "search.space.seed", "Write recipe=sweep"),
    "half of a range": Case(f"{ON} search.space.adapter.rank='{{low: 2}}'", "rank.high", "is required"),
    "a range the wrong way round": Case(
        f"{ON} search.space.adapter.dropout='{{low: 0.3, high: 0.1}}'",
        "dropout: low 0.3",
        "Write the smaller one first",
    ),
    "logarithm of nothing": Case(
        f"{ON} search.space.adapter.dropout='{{low: 0, high: 0.1, log: true}}'", "log=true", "Write log: false"
    ),
    "fractions of a rank": Case(
        f"{ON} search.space.adapter.rank='{{low: 2, high: 8}}'", "search.space.adapter.rank", "need integer: true"
    ),
    "outside of what a key takes": Case(
        f"{ON} search.space.adapter.dropout='{{low: 0, high: 1}}'", "search.space.adapter.dropout", "less than 1"
    ),
    "a peer's word": Case(
        f"{ON} search.space.adapter.dropout='{{min: 0, max: 0.1}}'", "dropout.min", "or {low: 1.0e-4"
    ),
    "more trials than settings": Case(
        f"{BARE} search.space.adapter.rank=[2,4] search.trials=5",
        "search.trials: 5, and search.space has 2 settings",
        "Write search.trials=2, or recipe=sweep",
    ),
    "one of one goes on": Case(f"{ON} search.eta=1", "search.eta", "greater than or equal to 2"),
    "a comparison before the first step": Case(
        f"{ON} search.eta=4 search.rungs=3", "search.rungs=3 with eta=4", "Write search.rungs=2, or longer trainings"
    ),
    "a sampler that is none": Case(f"{ON} search.sampler=gp", "search.sampler", "'random' or 'tpe'"),
    "patience": Case(f"{ON} evaluate.patience=2 save.ship=best", "evaluate.patience", "Leave it out"),
    "shares of DeepSpeed": Case(
        f"{ON} distributed.zero=2", "distributed: a search trains its members in one bank", "engine: fsdp2"
    ),
    "members apart over shares": Case(
        f"{ON} distributed='{{engine: fsdp2, zero: 3}}' search.together=false search.rungs=2",
        "search.together=false asks for it",
        "leave section distributed out",
    ),
    "members without an end": Case(
        f"{ON} budget.time=1h train.steps=null", "budget: ends the search, not its members", "Write train.epochs=1"
    ),
    "settings that do not go together": Case(
        f"{ON} search.space.schedule.name=[linear,plateau] evaluate.every=null", "evaluate.every", "Write evaluate"
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_message_says_where_and_what_to_write(
    case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if told := refusal(case.command.removeprefix("check ")):  # by every verb that reads a recipe
        assert case.place in told and case.cure in told, told
    else:
        assert_refused(case, folder, monkeypatch, capsys)
