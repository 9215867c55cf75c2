"""Members of a fleet are runs: their settings stand over those of all, dotted or nested, inline or in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from workbench.config import RunConfig
from workbench.config.expansions import fleet_expansion
from workbench.errors import ConfigError
from workbench.schema import parse


def fleet(members: Any, **sections: Any) -> RunConfig:
    return parse(RunConfig, {"recipe": "fleet", "fleet": {"members": members}, **sections}, source="my.yaml")


def test_settings_of_a_member_stand_over_those_of_all() -> None:
    data = {"max_tokens": 64, "held_out": 0.2, "columns": {"prompt": "q"}}
    members = {
        "ann": {"data.train": "a.jsonl", "adapter.rank": 8, "data.columns": {"completion": "a"}},
        "bob": {"data": {"train": "b.jsonl", "held_out": {"one": "c.jsonl", "two": "d.jsonl"}}, "seed": 3},
        "cyd": {"data.sources.x.path": "e.jsonl", "data.sources.y.path": "f.jsonl", "adapter": {"method": "rslora"}},
    }
    ann, bob, cyd = fleet_expansion.trials(fleet(members, data=data, adapter={"rank": 2, "alpha": 4}, seed=1))
    assert {each.config.recipe for each in (ann, bob, cyd)} == {"sft"} and [ann.name, cyd.number] == ["ann", 2]
    assert (ann.config.data.train, ann.config.data.max_tokens, ann.config.seed) == ("a.jsonl", 64, 1)
    assert ann.config.adapter.model_dump()["rank"] == 8 and ann.config.adapter.model_dump()["alpha"] == 4
    assert ann.config.data.columns == {"prompt": "q", "completion": "a"}
    assert (bob.config.seed, bob.config.data.held_out) == (3, {"one": "c.jsonl", "two": "d.jsonl"})
    assert bob.settings["data.train"] == "b.jsonl"
    assert list(cyd.config.data.sources) == ["x", "y"] and cyd.config.data.train == ""
    assert cyd.config.adapter.method == "rslora" and cyd.config.adapter.model_dump()["rank"] == 2


def test_a_folder_has_a_file_for_each_member(tmp_path: Path) -> None:
    (tmp_path / "bob.yaml").write_text("data: {train: b.jsonl}\nadapter.rank: 3\n")
    (tmp_path / "ann.yaml").write_text("data.train: a.jsonl\n")
    found = fleet(str(tmp_path))
    assert list(found.fleet.members) == ["ann", "bob"]
    trained = [trial.config.data.train for trial in fleet_expansion.trials(found)]
    assert trained == ["a.jsonl", "b.jsonl"]
    again = parse(RunConfig, found.model_dump(mode="json"), source="config.yaml")
    assert again == found, "the run directory keeps what the files said"


def test_all_mistakes_are_named_by_member_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        fleet({"ann": {"data.train": "a", "adapter.rank": 0}, "bob": {"data.train": "b", "optimizer.betas": 3}})
    assert "fleet.members.ann.adapter.rank" in str(error.value)
    assert "fleet.members.bob.optimizer.betas" in str(error.value)


def test_a_fleet_may_grow_at_its_end_alone() -> None:
    one, two = {"data.train": "a"}, {"data.train": "b"}
    small, large = (fleet(each).model_dump(mode="json") for each in ({"ann": one}, {"ann": one, "bob": two}))
    assert fleet_expansion.grown(small, large) and not fleet_expansion.grown(large, small)
    for other in ({"bob": two, "ann": one}, {"ann": two, "bob": two}, {"ann": one}):
        assert not fleet_expansion.grown(small, fleet(other).model_dump(mode="json"))


def test_batches_of_members_are_shared_like_that_of_all() -> None:
    members = {
        "ann": {"data.train": "a.jsonl", "batch.size": 7},
        "bob": {"data": {"train": "b.jsonl"}, "batch": {"size": 4}},
        "cyd": {"data.train": "c.jsonl"},
    }
    halved = fleet_expansion.with_batches(fleet(members, batch={"size": 6}), lambda size: -(-size // 2))
    found = {each.name: (each.config.batch.size, each.config.data.train) for each in fleet_expansion.trials(halved)}
    assert found == {"ann": (4, "a.jsonl"), "bob": (2, "b.jsonl"), "cyd": (6, "c.jsonl")}
