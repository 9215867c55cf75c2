"""Plans of fleets: the members that train at once, and no dry run of the same steps twice."""

from __future__ import annotations

from typing import Any

from workbench.config import RunConfig
from workbench.recipes.load import load
from workbench.recipes.verbs.plans import plan_fleet


def test_plans_of_the_same_steps_are_one() -> None:
    made: list[RunConfig] = []

    def make(config: RunConfig) -> Any:
        made.append(config)
        return len(made)

    remembered = plan_fleet.remembering(make)
    same = [remembered(load("fleet/quickstart", [f"train.checkpointing={how}"])) for how in ("auto", "false", "auto")]
    others = [remembered(load("fleet/quickstart", [word])) for word in ("train.checkpointing=true", "fleet.at_once=2")]
    assert same == [1, 1, 1] and others == [2, 3]
    assert made[0].train.checkpointing is False


def test_members_that_train_at_once_are_the_largest_in_the_order_of_the_fleet() -> None:
    ranks = {"a": 4, "b": 32, "c": 2, "d": 8}
    rows = "data.train: starter/arithmetic_start.jsonl"
    members = ", ".join(f"{name}: {{{rows}, adapter.rank: {rank}}}" for name, rank in ranks.items())
    config = load("fleet/quickstart", ["fleet.at_once=3", f"fleet.members={{{members}}}"])
    assert [each.name for each in plan_fleet.largest_first(config)] == ["b", "d", "a", "c"]
    assert [each.name for each in plan_fleet.at_once(config)] == ["a", "b", "d"]
