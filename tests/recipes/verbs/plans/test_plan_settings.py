"""What a plan says of the run that it carries out instead of the one that is asked for."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.config import RunConfig
from workbench.planning import sharded_memory
from workbench.recipes.load import load
from workbench.recipes.verbs.plans import plan


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({"recipe": "sft", "data": {"train": "x.jsonl"}, **sections})


@pytest.mark.parametrize(
    ("sections", "counted", "end"),
    [
        ({"budget": {"time": "30m"}, "train": {"epochs": None}}, "of one pass over the rows", "after 30 min"),
        ({"budget": {"time": "2h"}, "train": {"steps": 500}}, "that nothing cuts short", "after 2 h"),
        ({"budget": {"time": "slurm"}, "train": {"steps": 500}}, "that nothing cuts short", "when its Slurm job does"),
        ({"budget": {"energy": 2000, "power": 1000}, "train": {"epochs": None}}, "of one pass", "after 2 h"),
    ],
)
def test_of_a_run_that_a_clock_ends_a_plan_says_what_it_counts(
    sections: dict[str, Any], counted: str, end: str
) -> None:
    (sentence,) = plan.clock(config(**sections))
    assert counted in sentence and end in sentence
    assert not plan.untimed(config(**sections)).budget.timed


@pytest.mark.parametrize("sections", [{"train": {"steps": 500}}, {"budget": {"tokens": 10_000}}])
def test_others_end_where_the_plan_does(sections: dict[str, Any]) -> None:
    assert not list(plan.clock(config(**sections)))


def test_where_the_layout_is_left_to_choose_gradients_stay_compressed() -> None:
    words = ["data.limit=20", "data.held_out=0.2", "train.steps=2", "distributed.compression.gradients=powersgd"]
    planned = plan.plan(load("sft/quickstart", words), devices=2)
    assert sharded_memory.WAITING in planned.at_peak and planned.distributed.words == "each device holds all"
    sharded = config(distributed={"zero": 2}).distributed
    assert sharded.settled is sharded
