"""From words on a command line to a configuration, and a free place for its run."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench import recipes
from workbench.config import RunConfig
from workbench.errors import ConfigError, FileError
from workbench.recipes.load import directory, load

RECIPE = "recipe: sft\ndata: {train: my.jsonl, held_out: mine.jsonl, test: last.jsonl}\n"


def test_every_shipped_recipe_loads_and_says_its_command() -> None:
    assert "sft/quickstart" in recipes.shipped()
    for name in recipes.shipped():
        assert isinstance(load(name), RunConfig)
        assert recipes.find(name).read_text().startswith(f"# workbench run {name}")


def test_overrides_are_applied(tmp_path: Path) -> None:
    config = load("sft/quickstart", ["train.epochs=3", "adapter.rank=4", "evaluate.every=null"])
    assert (config.train.epochs, config.adapter.model_dump()["rank"], config.evaluate.every) == (3.0, 4, None)
    path = tmp_path / "my.yaml"
    path.write_text(RECIPE)
    assert load(path, ["seed=7"]) == load(str(path), ["seed=7"])


@pytest.mark.parametrize(
    ("words", "held_out", "test"),
    [
        ([], "mine.jsonl", "last.jsonl"),
        (["data.train=other.jsonl"], "mine.jsonl", "last.jsonl"),
        (["data.sources.a.path=other.jsonl", "data.sources.b.path=more.jsonl"], "mine.jsonl", "last.jsonl"),
        (["data.train=other.jsonl", "data.held_out=0.2"], 0.2, "last.jsonl"),
    ],
)
def test_other_training_data_leave_a_persons_own_held_out_files_as_they_are(
    tmp_path: Path, words: list[str], held_out: float | str, test: str | None
) -> None:
    (tmp_path / "my.yaml").write_text(RECIPE)
    config = load(tmp_path / "my.yaml", words)
    assert (config.data.held_out, config.data.test) == (held_out, test)


@pytest.mark.parametrize(
    ("words", "held_out", "test"),
    [
        (["data.train=other.jsonl"], 0.05, None),
        (["data.sources.a.path=other.jsonl", "data.sources.b.path=more.jsonl"], 0.05, None),
        (["data.train=other.jsonl", "data.held_out=0.2"], 0.2, None),
        (["data.train=other.jsonl", "data.test=last.jsonl"], 0.05, "last.jsonl"),
    ],
)
def test_other_training_data_replace_a_shipped_examples_held_out_files(
    tmp_path: Path, words: list[str], held_out: float | str, test: str | None
) -> None:
    (tmp_path / "my.yaml").write_text(RECIPE.replace("my.jsonl", "starter/fairytaleqa_train.jsonl"))
    config = load(tmp_path / "my.yaml", words)
    assert (config.data.held_out, config.data.test) == (held_out, test)


def test_sets_with_names_take_the_place_of_a_single_one_and_stand_beside_named_ones(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(RECIPE)
    words = ["data.held_out.a=a.jsonl", "data.test.a=a.jsonl", "data.test.b=b.jsonl"]
    for more in ([], ["data.train=other.jsonl"]):
        data = load(tmp_path / "my.yaml", [*more, *words]).data
        assert data.held_out_files == {"a": "a.jsonl"} and data.test_files == {"a": "a.jsonl", "b": "b.jsonl"}
    (tmp_path / "my.yaml").write_text(RECIPE.replace("mine.jsonl", "0.2").replace("last.jsonl", "{c: c.jsonl}"))
    data = load(tmp_path / "my.yaml", words).data
    assert data.held_out_files == {"a": "a.jsonl"} and list(data.test_files) == ["c", "a", "b"]
    assert load(tmp_path / "my.yaml", ["data.test={a: a.jsonl}", "data.test.b=b.jsonl"]).data.test_files.keys() == {
        "a",
        "b",
    }


@pytest.mark.parametrize("name", ["crossval/pictures", "crossval/combo", "distill/ensemble", "distill/pictures"])
def test_other_training_data_leave_a_shipped_example(name: str) -> None:
    own, other = load(name), load(name, ["data.train=mine"])
    assert own.data.limit and (own.pseudo_label.unlabelled or own.distill.unlabelled)
    assert (other.data.limit, other.data.test) == (None, None)
    assert other.pseudo_label.unlabelled is other.distill.unlabelled is None
    assert load(name, ["data.train=mine", "data.limit=9"]).data.limit == 9


def test_a_configuration_is_taken_as_it_is(tmp_path: Path) -> None:
    config = load("sft/quickstart")
    assert load(config) is config
    with pytest.raises(ConfigError, match="model_copy"):
        load(config, ["seed=1"])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sft/quickstrat", "Did you mean `sft/quickstart`?"),
        ("quickstart", "no such recipe"),
        ("rows.jsonl", "`workbench ls` shows what there is. A recipe of your own is a file"),
        ("missing.yaml", "no such file"),
    ],
)
def test_a_recipe_that_is_not_there(name: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(name)
    assert expected in str(caught.value) and name in str(caught.value)


@pytest.mark.parametrize(
    ("recipe", "folder"),
    [
        ("sft/quickstart", "sft-quickstart"),
        ("my.yaml", "my"),
        ("my.yml", "my"),
        ("./deep/my.yaml", "deep-my"),
        ("../my.yaml", "my"),
        ("~/my.yaml", "my"),
        (Path("/data/my.yaml"), "data-my"),
    ],
)
def test_the_run_directory_is_named_after_the_recipe(
    recipe: str | Path, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert directory(recipe, resume=False) == Path("runs") / folder
    assert directory(recipe, resume=True) == Path("runs") / folder


def test_a_new_run_takes_the_first_free_number_and_resuming_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for expected in ("my", "my-2", "my-3"):
        path = directory("my.yaml", resume=False)
        assert path == Path("runs") / expected
        path.mkdir(parents=True)
        assert directory("my.yaml", resume=True) == path
    assert directory(load("sft/quickstart"), resume=False) == Path("runs/sft")


def test_a_run_that_failed_at_once_leaves_its_name_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = directory("my.yaml", resume=False)
    (path / "members/1").mkdir(parents=True)
    (path / "manifest.json").write_text('{"status": "failed"}')
    assert directory("my.yaml", resume=False) == directory("my.yaml", resume=True) == path
    (path / "members/1/checkpoints/step-00000001").mkdir(parents=True)
    assert directory("my.yaml", resume=False) == Path("runs/my-2")


def _without_schema(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if not line.startswith(recipes.FOR_EDITORS)]


def test_copying_a_recipe_keeps_its_comments_and_never_overwrites(tmp_path: Path) -> None:
    file = tmp_path / "new" / "my.yaml"
    recipes.copy("sft/quickstart", file)
    assert _without_schema(file) == _without_schema(recipes.find("sft/quickstart"))
    assert load(file) == load("sft/quickstart")
    with pytest.raises(ConfigError, match="exists already"):
        recipes.copy("sft/quickstart", file)
    with pytest.raises(FileError, match="cannot be written"):
        recipes.copy("sft/quickstart", file / "below" / "my.yaml")
