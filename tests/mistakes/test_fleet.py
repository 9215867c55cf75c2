"""Mistakes with section `fleet` end in status 2 and a message that names the member and the cure, before training."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.mistakes.cases import Case, assert_refused, refusal
from workbench.cli import verbs

BARE = "check my.yaml recipe=fleet train.steps=3"


def member(settings: str) -> str:
    return f"{BARE} fleet.members='{{eve: {{data.train: rows.jsonl, {settings}}}}}'"


CASES = {
    "nobody": Case(BARE, "fleet.members", "needs a member, such as {alice:"),
    "beside another recipe": Case("check my.yaml fleet.at_once=3", "fleet is for recipe=fleet", "Leave fleet out"),
    "a name that is no folder's": Case(
        f"{BARE} fleet.members='{{a/b: {{data.train: rows.jsonl}}}}'", "fleet.members.a/b", "names a folder"
    ),
    "no rows": Case(f"{BARE} fleet.members='{{eve: {{seed: 1}}}}'", "fleet.members.eve.data.train", "data.train=FILE"),
    "a key that is none": Case(member("adapter.rnk: 2"), "fleet.members.eve.adapter.rnk", "Did you mean"),
    "a key of a shared section that is none": Case(
        member("train.stepz: 2"), "fleet.members.eve.train.stepz", "Did you mean `steps`"
    ),
    "a value that is none": Case(member("train: {steps: 0}"), "fleet.members.eve.train.steps", "greater than 0"),
    "another backbone": Case(member("model.id: other"), "fleet.members.eve.model.id", "Write model.id beside"),
    "another computation": Case(member("train.compile: true"), "fleet.members.eve.train.compile", "run of its own"),
    "settings that do not go together": Case(
        member("schedule.name: plateau, evaluate.every: null"), "fleet.members.eve", "evaluate.every"
    ),
    "rows that the backbone chooses": Case(
        member("data.select: {by: ifd, rows: 0.5}"), "fleet.members.eve.data.select", "by=ifd"
    ),
    "an order that is measured first": Case(
        member("data.curriculum: {by: perplexity}"), "fleet.members.eve.data.curriculum", "run of its own"
    ),
    "the clock": Case(f"{member('seed: 1')} budget.time=1h", "budget", "of each member"),
    "freezing": Case(f"{member('seed: 1')} freeze='{{policy: static, layers: 0.5}}'", "freeze", "Leave it out"),
    "shares of DeepSpeed": Case(
        f"{member('seed: 1')} distributed.zero=2",
        "distributed: a fleet trains its members in one bank",
        "engine: fsdp2",
    ),
    "a method that needs whole weights": Case(
        f"{member('adapter: {method: ia3}')} distributed='{{engine: fsdp2, zero: 3}}'",
        "fleet.members.eve: adapter.method: ia3 in a bank needs weights that are whole",
        "run of its own",
    ),
    "an optimizer that needs whole matrices": Case(
        f"{member('optimizer: {name: muon}')} distributed='{{engine: fsdp2, zero: 3}}'",
        "optimizer.name=muon goes with whole weights",
        "optimizer.name=adamw",
    ),
    "codes of gradients": Case(
        f"{member('seed: 1')} distributed='{{engine: fsdp2, zero: 3, compression: {{gradients: bfloat16}}}}'",
        "distributed.compression is of one training",
        "Leave it out",
    ),
    "no room": Case(f"{member('seed: 1')} fleet.at_once=0", "fleet.at_once", "greater than 0"),
    "a number for a name": Case(
        f"{BARE} fleet.members='{{17: {{data.train: rows.jsonl}}}}'",
        "fleet.members: YAML takes the name 17",
        'quotes: "17"',
    ),
    "a list of members": Case(f"{BARE} fleet.members='[eve, bob]'", "fleet.members: found ['eve'", "{alice: {data"),
    "a folder without members": Case(f"{BARE} fleet.members=nowhere", "fleet.members", "one a member"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_message_says_where_and_what_to_write(
    case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if told := refusal(case.command.removeprefix("check ")):  # by every verb that reads a recipe
        assert case.place in told and case.cure in told, told
    else:
        assert_refused(case, folder, monkeypatch, capsys)


@pytest.mark.parametrize("members", ["{}", "nowhere", "[eve]", "{eve: {seed: 1}}"])
def test_rows_of_the_fleet_itself_are_not_asked_for(
    members: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fleet has no rows but its members'."""
    (tmp_path / "fleet.yaml").write_text(f"recipe: fleet\nmodel: {{id: starter}}\nfleet: {{members: {members}}}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["workbench", "check", "fleet.yaml"])
    with pytest.raises(SystemExit) as ended:
        verbs.main()
    told = capsys.readouterr().err
    assert ended.value.code == 2 and "has 1 mistake" in told and "fleet.members" in told and "train is" not in told
