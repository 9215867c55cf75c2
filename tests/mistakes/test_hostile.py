"""Hostile values end in one sentence: endless names, nesting and files, and wrong kinds of values."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from workbench.cli import verbs
from workbench.config import ModelConfig
from workbench.config.yaml_text import read_yaml
from workbench.data.source_files import data_files
from workbench.errors import BackboneError, ConfigError, DataError, WorkbenchError
from workbench.models import backbone_source
from workbench.recipes.load import load
from workbench.runs import files

LONG = "a" * 5000
WORDS = [
    ["data.sources={mine: {path: F, weigh: 2}}"],
    ["data.sources={mine: {path: F, filter: {a: 1}}}"],
    ["data.sources={a: 3}"],
    ["data.sources={a: [1]}"],
    ["data.sources={weight: {limit: x, path: 1}, path: 3}"],
    ["data.sources.mine.columns.a=[1]"],
    ["data.sources={1: {train: a}}"],
    ["plugins=[1]"],
    ["plugins=[[a]]"],
    ["plugins=[null]"],
    ["plugins={a: 1}"],
    [f"plugins=[{LONG}.py]"],
    ["recipe=fleet", f"fleet.members={LONG}"],
    ["recipe=fleet", "fleet.members={a: 3}"],
    ["recipe=fleet", "fleet.members={a: {plugins: [1]}}"],
    ["model.id=\ud800"],
    ["seed=\udcff"],
    ["rewards=[{kind: [1]}]"],
]


@pytest.mark.parametrize("words", WORDS, ids=range(len(WORDS)))
def test_a_setting_is_told(words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load("sft/quickstart", words)
    assert str(caught.value).encode("ascii", "backslashreplace")


@pytest.mark.parametrize(
    "word",
    [
        "data.train={}",
        "data.held_out={}",
        "data.test={{a: {}}}",
        "model.id={}",
        "model.chat_template={}",
        "plugins=[{}]",
    ],
)
def test_a_setting_without_an_end_is_told(tmp_path: Path, word: str) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    for path in (tmp_path / "pipe.py", "/dev/zero", "/dev/urandom"):
        with pytest.raises(ConfigError, match=r"is a pipe or a device, which has no end|is no Python file"):
            load("sft/quickstart", [word.format(path)])


def test_a_recipe_and_rows_without_an_end_are_told(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match="is a pipe or a device"):
        data_files(str(tmp_path / "rows.jsonl"))
    with pytest.raises(ConfigError, match="is a pipe or a device"):
        read_yaml(tmp_path / "rows.jsonl")
    assert files.read_json(tmp_path / "rows.jsonl") == {}


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json", "more.bin"])
def test_a_backbone_without_an_end_is_told(tmp_path: Path, file: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / file).unlink(missing_ok=True)
    os.mkfifo(tmp_path / file)
    with pytest.raises(BackboneError, match=rf"{file} is a pipe or a device"):
        backbone_source.require_whole(ModelConfig(id=str(tmp_path)))


COMMANDS = [
    ["run", "sft/quickstart", "--out", "a" * 260],
    ["run", LONG],
    ["evaluate", LONG],
    ["merge", f"{LONG}/b", "--out", "x"],
    ["compare", LONG, LONG],
    ["cp", "sft/quickstart", LONG],
    ["import", LONG, "--out", "x.yaml"],
    ["schema", "--out", LONG],
    ["run", "\udcff"],
]


@pytest.mark.parametrize("words", COMMANDS, ids=range(len(COMMANDS)))
def test_a_command_ends_in_a_sentence(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["workbench", *words])
    with pytest.raises(SystemExit) as ended:
        verbs.main()
    told = capsys.readouterr().err
    assert ended.value.code == 2 and "Traceback" not in told and len(told) > 10, told


def test_a_schema_replaces_no_file(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text("{}")
    with pytest.raises(WorkbenchError, match=r"is there already\. Remove it, or write another --out"):
        verbs.schema(tmp_path / "mine.json")
    assert (tmp_path / "mine.json").read_text() == "{}"
    verbs.schema(tmp_path / "new.json")
    assert (tmp_path / "new.json").stat().st_size > 10_000
