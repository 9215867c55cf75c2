"""The members of a sweep are the product of its values, each a whole run; every mistake is told at its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from workbench.config import RunConfig
from workbench.config.expansions import sweep_expansion
from workbench.config.yaml_text import override
from workbench.errors import ConfigError
from workbench.schema import parse

BASE: dict[str, Any] = {
    "recipe": "sweep",
    "seed": 7,
    "data": {"train": "rows.jsonl"},
    "sweep": {"over": {"train.learning_rate": [1e-3, 0.01], "adapter.rank": [2, 4, 8], "seed": [0, 1]}},
}


def sweep(*words: str, **sections: Any) -> RunConfig:
    return parse(RunConfig, override({**BASE, **sections}, words), source="my.yaml")


def mistakes(*words: str, **sections: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        sweep(*words, **sections)
    first, *lines = str(caught.value).splitlines()
    assert first == f"my.yaml has {len(lines)} mistake{'s' if len(lines) > 1 else ''}:"
    return [line.strip() for line in lines]


def test_members_are_the_product_in_order() -> None:
    found = sweep_expansion.trials(sweep())
    assert [(each.config.train.learning_rate, each.config.adapter.rank, each.config.seed) for each in found] == [  # type: ignore[attr-defined]
        (rate, rank, seed) for rate in (0.001, 0.01) for rank in (2, 4, 8) for seed in (0, 1)
    ]
    assert found[0].name == "learning_rate=0.001,rank=2,seed=0" and len({each.name for each in found}) == 12
    assert found[-1].settings == {"train.learning_rate": 0.01, "adapter.rank": 8, "seed": 1}
    assert {each.config.recipe for each in found} == {"sft"}
    shared = sweep_expansion.shared(sweep())
    assert shared.seed == 7 and shared.model_copy(update={"seed": 0}) == found[0].config


def test_a_members_run_is_what_its_own_file_would_say() -> None:
    words = ("train.learning_rate=0.01", "adapter.rank=4", "seed=1", "data.seed=7", "recipe=sft", "sweep={}")
    assert sweep_expansion.trials(sweep())[9].config == sweep(*words)


def test_a_command_line_adds_keys_and_replaces_values() -> None:
    over = sweep("sweep.over.train.learning_rate=[1, 2]", "sweep.over.schedule.warmup=[0, 0.1]").sweep.over
    assert over["train.learning_rate"] == (1, 2) and over["schedule.warmup"] == (0, 0.1) and over["seed"] == (0, 1)


def test_names_are_folders_of_their_own() -> None:
    targets = [[f"layer_{number}/{part}_proj" for number in range(9)] for part in "qk"]
    found = sweep_expansion.trials(sweep(sweep={"over": {"adapter.targets": targets}}))
    names = [each.name for each in found]
    assert len(set(names)) == 2 and all("/" not in name and len(name) < 110 for name in names)


def test_members_of_other_methods_have_the_settings_that_are_theirs() -> None:
    """What differs from its default holds for all that have it; anything else is each method's own."""
    section = {"method": "lora", "rank": 5, "targets": "attention", "dropout": 0.2}
    over = {"adapter.method": ["rslora", "dora", "ia3", "houlsby", "vera"]}
    members = sweep_expansion.trials(sweep(adapter=section, sweep={"over": over}))
    found = {each.config.adapter.method: each.config.adapter.model_dump(exclude_unset=True) for each in members}
    shared = {"rank": 5, "targets": "attention", "dropout": 0.2}
    assert found["vera"] == {"method": "vera", **shared} and found["ia3"] == {"method": "ia3", "targets": "attention"}
    assert found["houlsby"] == {"method": "houlsby", "dropout": 0.2}
    assert all({**shared, "alpha": 32.0}.items() <= found[name].items() for name in ("rslora", "dora"))
    (vera,) = sweep_expansion.trials(sweep(sweep={"over": {"adapter.method": ["vera", "ia3"]}}))[:1]
    assert vera.config.adapter.rank == 256  # type: ignore[attr-defined]  # and not the 16 of lora


def test_members_of_several_methods_may_differ_in_what_all_have() -> None:
    over = {"adapter.method": ["houlsby", "parallel"], "adapter.width": [4, 8]}
    found = sweep_expansion.trials(sweep(sweep={"over": over}))
    assert [(each.config.adapter.method, each.config.adapter.width) for each in found] == [  # type: ignore[attr-defined]
        ("houlsby", 4), ("houlsby", 8), ("parallel", 4), ("parallel", 8)
    ]  # fmt: skip


def test_what_is_shipped_is_the_best_member_with_the_rows_of_the_sweep(tmp_path: Path) -> None:
    config = sweep()
    values = config.model_dump(mode="json")
    before = parse(RunConfig, sweep_expansion.shipped_values(values, tmp_path, {}), source="x")
    assert before.recipe == "sft" and before.seed == 7
    best = sweep_expansion.trials(config)[9]
    rows = [{"member": each.name, "settings": each.settings} for each in sweep_expansion.trials(config)]
    table = {"best": best.name, "members": rows}
    found = parse(RunConfig, sweep_expansion.shipped_values(values, tmp_path, table), source="x")
    assert found == best.config.model_copy(update={"seed": 7, "data": config.data})
    assert found.rows_seed == best.config.rows_seed
    plain = found.model_dump(mode="json")
    assert sweep_expansion.shipped_values(plain, tmp_path, {}) == plain


def test_all_mistakes_are_told_at_once() -> None:
    over = {
        "train": {"lerning_rate": [1, 2]},
        "model.id": ["a", "b"],
        "data.limit": [3, 4],
        "image.size": [32, 64],
        "classes.text": ["{a}", "{b}"],
        "adapter": [1, 2],
        "save.ship": ["last", "best"],
    }
    found = mistakes("evaluate.every=null", "trackers=[wandb]", sweep={"over": over})
    for number, told in enumerate(
        (
            "sweep.over.train.lerning_rate: unknown key. Did you mean `train.learning_rate`?",
            "sweep.over.model.id: members cannot differ in model.id: the members share one loaded backbone. Run a",
            "sweep.over.data.limit: members cannot differ in data.limit: the members learn from the same rows",
            "sweep.over.image.size: members cannot differ in image.size: the members read the same pictures.",
            "sweep.over.classes.text: members cannot differ in classes.text: the members read the same rows",
            "sweep.over.adapter: is a section. Name one of its keys, such as adapter.",
            "sweep.over.save.ship: members cannot differ in save.ship: it is the same for all members. Write it beside",
            "evaluate.every: a sweep compares held-out losses. Write evaluate.every=0.25.",
            "trackers: a sweep sends nothing anywhere. Leave it out.",
        )
    ):
        assert found[number].startswith(told)
    assert len(found) == 9


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({}, "sweep.over: needs two members or more, such as {train.learning_rate: [1.0e-4, 1.0e-3]}."),
        ({"seed": [1]}, "sweep.over: needs two members or more"),
        ({"seed": 3}, "sweep.over.seed: expected a list such as [a, b], found 3."),
        ({"seed": []}, "sweep.over.seed: expected at least 1 item, found []."),
        ({"train.learning_rate": [1e-3, "1e-3"]}, "sweep.over.train.learning_rate: duplicate value."),
        ({"seed": list(range(1001))}, "sweep.over: 1,001 members; 1,000 at most. Write fewer values."),
        ({"train.learning_rate": [-1, 0.1]}, "sweep.over.train.learning_rate: expected greater than 0, found -1."),
        ({"adapter.rnk": [1, 2]}, "sweep.over.adapter.rnk: unknown key. Did you mean `adapter.rank`?"),
        (
            {"schedule.warmup": [0.1, 0.9], "schedule.name": ["wsd", "linear"]},
            "schedule: warmup 0.9 and decay 0.2 together exceed the run; make them sum to 1 or less. "
            "(member warmup=0.9,name=wsd)",
        ),
        ({"evaluate.patience": [1, 2]}, "the recipe: evaluate.patience stops some evaluations after the best one"),
    ],
)
def test_mistakes_say_what_to_write(over: dict[str, Any], message: str) -> None:
    (found,) = mistakes(sweep={"over": over})
    assert found.startswith(message)


def test_a_sweep_beside_another_recipe_is_refused() -> None:
    (found,) = mistakes("recipe=sft")
    assert found.startswith("the recipe: sweep is for recipe=crossval|sweep; recipe=sft has none.")
