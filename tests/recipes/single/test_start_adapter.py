"""Members of recipes over a task begin with the adapter that `train.start` names, or are refused before they train."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import workbench
from tests.mistakes import conftest
from tests.mistakes.cases import trained as train
from workbench.errors import ConfigError

RECIPE = conftest.RECIPE.replace("{steps: 2}", "{steps: 3, learning_rate: 0.01}").replace("every: null", "every: 0.5")
ROWS = [{"question": f"What comes after {n}?", "answer": f"It is {n + 1}."} for n in range(24)]
FLEET = "fleet.members={a: {data: {train: rows.jsonl}}, b: {data: {train: rows.jsonl}}}"
SEARCH = ["recipe=search", "search.trials=2", "search.rungs=1"]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, stories: str) -> Path:
    """A run of RECIPE. Read only."""
    return train(RECIPE, ROWS, tmp_path_factory.mktemp("first"), stories)


def words(first: Path, stories: str, over: list[str]) -> list[str]:
    rows = first.parent / "rows.jsonl"
    own = [f"model.id={stories}", f"train.start={first}", f"data.train={rows}"]
    return [*own, *(word.replace("rows.jsonl", str(rows)) for word in over)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "over",
    [
        ["recipe=sweep", "sweep.over={train.learning_rate: [0.001, 0.002]}"],
        [*SEARCH, "search.space={train.learning_rate: [0.001, 0.002, 0.003]}"],
    ],
    ids=["sweep", "search"],
)
def test_every_member_goes_on_from_the_start(over: list[str], first: Path, stories: str, tmp_path: Path) -> None:
    recipe = first.parent / "my.yaml"
    run = workbench.run(recipe, words(first, stories, over), out=tmp_path / "run", quiet=True)
    ended = json.loads((first / "scores.json").read_text())["after"]["loss"]
    started = list((run / "members").glob("*/before.json"))
    assert len(started) == 2
    for path in [*started, run / "before.json"]:
        assert json.loads(path.read_text())["scores"]["loss"] == pytest.approx(ended, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("over", "told"),
    [
        (["recipe=fleet", FLEET], r"members.a: train.start: the members of a bank begin with fresh adapters"),
        (["recipe=sweep", "sweep.over={adapter.rank: [2, 4]}"], r"has adapter.rank=2, and this run 4"),
        ([*SEARCH, "search.space={adapter.rank: [2, 4, 8]}"], r"has adapter.rank=2, and this run 4"),
    ],
    ids=["fleet", "sweep of ranks", "search of ranks"],
)
def test_a_member_that_cannot_is_refused(over: list[str], told: str, first: Path, stories: str) -> None:
    with pytest.raises(ConfigError, match=told):
        workbench.check(first.parent / "my.yaml", words(first, stories, over))


@pytest.mark.parametrize(
    ("over", "told"),
    [
        (["recipe=crossval", "data.held_out=0.05"], "Leave train.start out"),
        (["recipe=distill", "distill.teacher.id=backbone"], "Leave train.start out"),
        (["recipe=prefer"], "Write prefer.start instead"),
        (["recipe=classify"], "train.start is for recipe=sft. Leave it out"),
    ],
    ids=["folds", "student", "own start", "no start"],
)
def test_what_begins_afresh_refuses_a_start(over: list[str], told: str, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(RECIPE)
    with pytest.raises(ConfigError, match=told):
        workbench.load_recipe(tmp_path / "my.yaml", ["train.start=one", "evaluate.every=null", *over])


def test_a_member_of_a_fleet_has_no_start_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(RECIPE)
    over = ["recipe=fleet", "fleet.members={a: {data.train: rows.jsonl, train.start: one}}"]
    with pytest.raises(ConfigError, match=r"members.a.train.start: .* Leave it out, or train a alone"):
        workbench.load_recipe(tmp_path / "my.yaml", over)
