"""Configuration: every mistake at once, each with its place and its cure."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from workbench import recipes
from workbench.config import RunConfig, load_config
from workbench.config.yaml_text import dump_yaml, load_yaml, override, read_yaml
from workbench.errors import ConfigError
from workbench.schema import parse

GOOD = {"recipe": "sft", "data": {"train": "rows.jsonl"}}


def test_every_mistake_is_reported_at_once() -> None:
    values = {**GOOD, "adapter": {"rnk": 3}, "train": {"epochs": "many"}, "sedd": 1}
    with pytest.raises(ConfigError) as caught:
        parse(RunConfig, values, source="my.yaml")
    text = str(caught.value)
    assert text.startswith("my.yaml has 3 mistakes:")
    assert "sedd: unknown key. Did you mean `seed`?" in text
    assert "train.epochs: expected a valid number" in text and "found 'many'" in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["adapter.method=lora", "adapter.rnk=3"], "adapter.rnk: unknown key. Did you mean `rank`?"),
        (["adapter.method=loar"], "adapter.method: unknown method 'loar'. Did you mean `lora`?"),
        (["batch.size=0"], "batch.size: expected greater than 0, found 0"),
        (["batch.tokens_per_device=lots"], "or 'auto', found 'lots'"),
        (["data.held_out=1.5"], "data.held_out: expected"),
        (["evaluate.every=-1"], "evaluate.every: expected greater than 0"),
        (["schedule.name=wsd", "schedule.warmup=0.9"], "make them sum to 1 or less"),
        (["adapter={method: full}", "model.weights=nf4"], "adapter.method=full does not work over nf4 weights"),
        (["evaluate.patience=3"], "write save.ship=best as well"),
        (["save.ship=best", "evaluate.every=null"], "write evaluate.every=0.1"),
        (["train.learning_rate=.nan"], "train.learning_rate: expected a finite number"),
        (
            ["data.columns={weight:w}"],
            "data.columns: a space belongs after each colon, else there is no value. Write {w",
        ),
        (["data.test={a:x.jsonl,b:y.jsonl}"], "data.test: a space belongs after each colon"),
        (["adapter={method:lora}"], "Write {method: lora}."),
        (["data.against=[x.jsonl]"], "data.against: unknown key. Did you mean `data.decontaminate.against`?"),
        (["data.column=n"], "Did you mean `data.fold.column` or `data.curriculum.column` or `columns`?"),
        (["rank=4"], "Did you mean `adapter.rank`"),
    ],
)
def test_mistakes_say_what_to_write(words: list[str], expected: str) -> None:
    values = override({**GOOD, "adapter": {"method": "lora"}}, words)
    with pytest.raises(ConfigError, match="1 mistake") as caught:
        parse(RunConfig, values, source="my.yaml")
    assert expected in str(caught.value)
    assert str(caught.value).count("loar") <= 1, "told once"


def test_no_list_of_what_is_known_is_told_twice() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(RunConfig, override(GOOD, ["data.clean=[c4]"]), source="my.yaml")
    assert str(caught.value).count("c4_javascript") == 1


def test_keys_below_a_value_need_the_value_to_go_first() -> None:
    values = override(GOOD, ["data.held_out=null", "data.held_out.a=x.jsonl", "data.held_out.b=y.jsonl"])
    assert values["data"]["held_out"] == {"a": "x.jsonl", "b": "y.jsonl"}
    with pytest.raises(
        ConfigError, match=r"`data\.held_out` is 0\.1, not a section .* Write data\.held_out=null before"
    ):
        override(GOOD, ["data.held_out=0.1", "data.held_out.a=x.jsonl"])


def test_overrides_win_and_leave_the_input_alone() -> None:
    before = {"train": {"epochs": 1}, "recipe": "sft"}
    after = override(before, ["train.epochs=3", "train.learning_rate=1e-4", "data.train=a.jsonl", "model.id=null"])
    assert before == {"train": {"epochs": 1}, "recipe": "sft"}
    assert after["train"]["epochs"] == 3 and after["data"]["train"] == "a.jsonl" and after["model"]["id"] is None


@pytest.mark.parametrize("word", ["novalue", "=3", "a..b=1", "recipe.x=1"])
def test_malformed_overrides_are_refused(word: str) -> None:
    with pytest.raises(ConfigError):
        override(GOOD, [word])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("recipe: sft\nrecipe: sft\n", 'duplicate key "recipe"'),
        ("data: {train: a, train: b}\n", 'duplicate key "train"'),
        ("recipe: [", "not valid YAML"),
        ("recipe: &a [*a]\n", "write the value, or quote it"),
        ("recipe: *a\n", "write the value, or quote it"),
        ("recipe: !!bool maybe\n", "write the value, or quote it"),
        ("recipe: !!int ''\n", "write the value, or quote it"),
        ("recipe: !!python/name:os\n", "write the value, or quote it"),
        ("%YAML 1.3\n---\nrecipe: sft\n", "write the value, or quote it"),
        ("recipe:\n\t- a\n", "cannot start any token"),
        (f"recipe: {'9' * 5000}\n", "5000 digits"),
        (f"recipe: {'[' * 5000}\n", "nested too deeply"),
        ("recipe: sft\n---\nrecipe: sft\n", "another document"),
        ("- 1\n", "expected a mapping"),
        ("", "expected a mapping"),
    ],
)
def test_yaml_that_is_no_recipe(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"my\.yaml") as caught:
        read_yaml(path)
    assert expected in str(caught.value)


def test_missing_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read as UTF-8"):
        load_config(tmp_path / "b.yaml")


def test_a_written_configuration_reads_back_equal() -> None:
    config = parse(RunConfig, override(GOOD, ["evaluate.every=0.1", "adapter.targets=[q_proj]"]), source="x")
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize("name", recipes.shipped())
def test_a_shipped_recipe_is_the_same_in_yaml_1_1_and_when_written(name: str) -> None:
    """PyYAML, which other tools read by, takes `no` and `010` for something else; no recipe depends on that."""
    values = read_yaml(recipes.find(name))
    config = parse(RunConfig, values, source=name)
    assert parse(RunConfig, yaml.safe_load(recipes.find(name).read_text()), source=name) == config
    assert parse(RunConfig, load_yaml(dump_yaml(config.model_dump(mode="json"))), source=name) == config


@pytest.mark.parametrize("word", ["off", "no", "on", "yes", "No", "OFF"])
def test_words_that_yaml_would_take_for_truth_values_are_words(tmp_path: Path, word: str) -> None:
    (tmp_path / "a.yaml").write_text(f"a: {word}\nb: true\nc: [false, True]\n")
    assert read_yaml(tmp_path / "a.yaml") == {"a": word, "b": True, "c": [False, True]}
    assert override({}, [f"a={word}", "b=false"]) == {"a": word, "b": False}


def test_another_policy_leaves_the_settings_of_the_file_that_it_does_not_have(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("recipe: sft\ndata: {train: rows.jsonl}\nfreeze: {policy: static, layers: 3}\n")
    assert load_config(tmp_path / "a.yaml", ["freeze.policy=lisa"]).freeze.policy == "lisa"
    with pytest.raises(ConfigError, match="layers"):
        load_config(tmp_path / "a.yaml", ["freeze.policy=lisa", "freeze.layers=3"])
