"""Recipes of many trainings on several devices: those that need a shared backbone say so."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.config import RunConfig
from workbench.errors import ConfigError
from workbench.recipes.verbs.plans.plan import plan
from workbench.runs.ranks import Ranks
from workbench.training.distributed import layout_checks

SECTIONS: dict[str, dict[str, Any]] = {
    "fleet": {"fleet": {"members": {"eve": {"data.train": "rows.jsonl"}}}},
    "search": {"search": {"space": {"adapter.rank": [2, 4]}, "trials": 2, "eta": 2, "rungs": 1}},
}
SHARED = {"engine": "fsdp2", "zero": 3}


def config(recipe: str, **sections: Any) -> RunConfig:
    base = {"recipe": recipe, "data": {"train": "rows.jsonl"}, "evaluate": {"every": 0.5}, "train": {"steps": 8}}
    return RunConfig.model_validate({**base, **SECTIONS[recipe], **sections})


@pytest.mark.parametrize("recipe", SECTIONS)
def test_several_devices_train_it_over_a_shared_backbone_alone(recipe: str) -> None:
    layout_checks.require(config(recipe), Ranks(0, 1))
    layout_checks.require(config(recipe, distributed=SHARED), Ranks(0, 2))
    with pytest.raises(ConfigError, match=r"Leave --devices out, or write distributed=\{engine: fsdp2, zero: 3\}"):
        layout_checks.require(config(recipe), Ranks(0, 2))
    with pytest.raises(ConfigError, match=r"write distributed\.engine=fsdp2 distributed\.zero=3"):
        plan(config(recipe), devices=2)


def test_the_clock_of_a_search_is_that_of_one_device() -> None:
    timed = config("search", distributed=SHARED, budget={"time": "1h"})
    layout_checks.require(timed, Ranks(0, 1))
    with pytest.raises(ConfigError, match=r"budget\.time ends the trainings of recipe search on one device only"):
        layout_checks.require(timed, Ranks(0, 2))
