"""A space of settings is read from YAML and words, its ends are whole runs, and every mistake is told at its place."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.config import RunConfig
from workbench.config.expansions import search_expansion
from workbench.config.expansions.sweep_expansion import shipped_values
from workbench.config.sections.search_config import Range
from workbench.config.yaml_text import override
from workbench.errors import ConfigError
from workbench.schema import parse

RATE = {"low": 1e-4, "high": 1e-2, "log": True}
BASE: dict[str, Any] = {
    "recipe": "search",
    "seed": 3,
    "data": {"train": "train.jsonl", "held_out": "held_out.jsonl"},
    "train": {"steps": 100},
    "search": {"space": {"train.learning_rate": RATE, "adapter.rank": [4, 8]}, "trials": 8},
}


def search(*words: str, **sections: Any) -> RunConfig:
    return parse(RunConfig, override({**BASE, **sections}, words), source="my.yaml")


def mistakes(*words: str, **section: Any) -> list[str]:
    with pytest.raises(ConfigError) as told:
        search(*words, search={**BASE["search"], **section})
    return [line.strip() for line in str(told.value).splitlines()[1:]]


def test_ends_of_the_space_are_runs_of_the_recipe_with_the_seed_of_the_search() -> None:
    ends = search_expansion.ends(search())
    assert len(ends) == 6 and {end.config.recipe for end in ends} == {"sft"}
    rates = sorted({end.config.train.learning_rate for end in ends})
    assert rates[::2] == [1e-4, 1e-2] and {end.config.seed for end in ends} == {3}
    assert search_expansion.shared(search()).adapter.method == "lora"
    (trial,) = search_expansion.trials(search(), [{"train.learning_rate": 0.0012345, "adapter.rank": 8}])
    assert trial.name == "000-learning_rate=0.0012345,rank=8" and trial.config.train.learning_rate == 0.0012345


def test_each_comparison_has_eta_times_the_rows_of_the_one_before_it_from_a_least_number_on() -> None:
    section = search("search.rows=60", "search.eta=2", "search.rungs=5").search
    assert [section.rows_at(rung) for rung in range(5)] == [8, 8, 15, 30, 60]
    few = search("search.rows=5", "search.rungs=3").search
    assert [few.rows_at(rung) for rung in range(3)] == [5, 5, 5]
    assert search("search.rows=null").search.rows_at(0) is None


def test_a_space_of_many_choices_is_checked_key_by_key() -> None:
    space = {"adapter.rank": list(range(1, 65)), "train.learning_rate": RATE, "schedule.warmup": [0.0, 0.1, 0.2, 0.3]}
    assert len(search_expansion.ends(search(search={"space": space}))) == 1 + 63 + 2 + 3


def test_a_command_line_reaches_into_the_space() -> None:
    words = ("search.space.train.weight_decay={low: 0, high: 0.1}", "search.space.adapter.rank=[2, 4]")
    space = search(*words, search={}).search.space
    assert space == {"train.weight_decay": Range(low=0, high=0.1), "adapter.rank": (2, 4)}


def test_what_is_shipped_is_the_best_member_without_the_clock_of_the_search(tmp_path: Any) -> None:
    config = search("budget.time=1h", "budget.tokens=1000000")
    table = {"best": "b", "members": [{"member": "b", "settings": {"train.learning_rate": 5e-3, "adapter.rank": 8}}]}
    values = shipped_values(config.model_dump(mode="json"), tmp_path, table)
    found = parse(RunConfig, values, source="x")
    assert (found.recipe, found.train.learning_rate, found.seed) == ("sft", 5e-3, 3)
    assert found.budget.time is None and found.budget.tokens == 1_000_000


@pytest.mark.parametrize(
    "section,message",
    [
        ({"space": {}}, "search.space: needs a key, such as {train.learning_rate: {low: 1.0e-4, high: 1.0e-2"),
        ({"space": {"adapter.rnk": [1, 2]}}, "search.space.adapter.rnk: unknown key. Did you mean `adapter.rank`?"),
        ({"space": {"adapter.beta": [1, 2]}}, "search.space.adapter.beta: unknown key. Known: adapter.alpha, adapter"),
        ({"space": {"adapter": [1, 2]}}, "search.space.adapter: is a section. Name one of its keys"),
        (
            {"space": {"model.id": ["a", "b"]}},
            "search.space.model.id: members cannot differ in model.id: the members share one loaded backbone. Run a",
        ),
        ({"space": {"data.limit": [1, 2]}}, "search.space.data.limit: members cannot differ in data.limit"),
        ({"space": {"seed": [1, 2]}}, "search.space.seed: a search would choose the luckiest seed. Write recipe=sweep"),
        (
            {"space": {"evaluate.patience": [1, 2]}},
            "search.space.evaluate.patience: halving ends members that do worse",
        ),
        ({"space": {"save.ship": ["best"]}}, "Write it beside the search, not in it."),
        ({"trials": 9, "space": {"adapter.rank": [1, 2]}}, "search.trials: 9, and search.space has 2 settings. Write"),
        ({"space": {"adapter.rank": [4, 4, 8]}, "trials": 2}, "search.space.adapter.rank: duplicate value"),
        ({"space": {"adapter.dropout": {"low": 0.2, "high": 0.1}}}, "low 0.2 is not below high 0.1. Write the smaller"),
        ({"space": {"adapter.dropout": {"low": 0, "high": 1.5}}}, "search.space.adapter.dropout: expected less than"),
        ({"space": {"adapter.rank": {"low": 4, "high": 64}}}, "Between low and high whole numbers need integer: true."),
        ({"space": {"adapter.rank": {"low": 0, "high": 9, "log": True}}}, "log=true needs numbers above 0"),
        ({"space": {"adapter.rank": {"low": 1.5, "high": 9, "integer": True}}}, "integer=true needs whole ends"),
        ({"space": {"adapter.rank": {"low": 1, "hi": 9}}}, "search.space.adapter.rank.hi: unknown key. Did you mean"),
        ({"space": {"adapter.rank": {"low": 1}}}, "search.space.adapter.rank.high: is required"),
        ({"space": {"adapter.rank": 8}}, "search.space.adapter.rank: expected values such as [a, b], or {low: 1.0e-4"),
        ({"space": {"adapter.rank": []}}, "search.space.adapter.rank: is empty. Write values"),
        ({"eta": 1}, "search.eta: expected greater than or equal to 2, found 1."),
        ({"rungs": 0}, "search.rungs: expected greater than or equal to 1, found 0."),
        ({"trials": 1}, "search.trials: expected greater than or equal to 2, found 1."),
        ({"sampler": "grid"}, "search.sampler: expected 'random' or 'tpe', found 'grid'."),
        ({"min": 0.1}, "search.min: unknown key."),
    ],
)
def test_mistakes_in_a_space(section: dict[str, Any], message: str) -> None:
    assert message in "\n".join(mistakes(**section))


@pytest.mark.parametrize(
    "words,message",
    [
        ("evaluate.every=null", "evaluate.every: a search compares held-out losses. Write evaluate.every=0.25."),
        ("evaluate.patience=2 save.ship=best", "evaluate.patience: halving ends members that do worse. Leave it out."),
        (
            "distributed.zero=2",
            "distributed: a search trains its members in one bank, each with an optimizer of its own",
        ),
        ("train.steps=null budget.time=1h", "budget: ends the search, not its members. Write train.epochs=1"),
        ("trackers=[wandb]", "trackers: a search sends nothing anywhere. Leave it out."),
        ("data.sampling.by=importance", "data.sampling: members of a search train on the same rows. Leave it out."),
    ],
)
def test_mistakes_beside_a_space(words: str, message: str) -> None:
    assert message in "\n".join(mistakes(*words.split()))


def test_a_search_beside_another_recipe_is_refused() -> None:
    with pytest.raises(ConfigError, match="search is for recipe=search; recipe=sft has none"):
        search("recipe=sft")
