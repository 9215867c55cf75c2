"""Every mistake a person can make ends in status 2 and a message with its place and its cure, and leaves nothing."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from workbench.cli import main

RECIPE = """
recipe: sft
model: {id: stories, weights: float32}
adapter: {method: lora, rank: 2}
data: {train: rows.jsonl, held_out: 0.2}
batch: {size: 4}
train: {steps: 2}
evaluate: {every: null, answers: 0}
"""
ROWS = [{"question": f"What comes after {n}?", "answer": f"It is {n + 1}."} for n in range(12)]

Prepare = Callable[[Path], object]
"""Makes a mistake in a folder that holds my.yaml, rows.jsonl, the backbone `stories` and the run `one`."""


class Case(NamedTuple):
    command: str
    place: str
    """What the message must name as the place: file, key, argument."""
    cure: str
    """What it must say to do."""
    prepare: Prepare = lambda folder: None


def file(name: str, content: str | bytes) -> Prepare:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def lines(rows: list[Any], name: str = "bad.jsonl") -> Prepare:
    return file(name, "".join(json.dumps(row) + "\n" for row in rows))


def removed(name: str) -> Prepare:
    return lambda folder: (folder / name).unlink()


def cut(name: str) -> Prepare:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - 100)


def changed(name: str, **values: Any) -> Prepare:
    """A JSON file with some of its values replaced."""
    return lambda folder: (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | values))


def backbone(*then: Prepare) -> Prepare:
    """A copy of the backbone, in the folder `m`, with something done to it."""

    def prepare(folder: Path) -> None:
        shutil.copytree(folder / "stories", folder / "m")
        for step in then:
            step(folder)

    return prepare


def config(value: str, place: str, cure: str) -> Case:
    """An override, or several, that `run` refuses."""
    return Case(f"run my.yaml {value}", place, cure)


def data(content: str | bytes | list[Any], place: str, cure: str, *, name: str = "bad.jsonl", also: str = "") -> Case:
    """A training file that `run` refuses; a list holds the rows of a jsonl file."""
    prepare = lines(content, name) if isinstance(content, list) else file(name, content)
    return Case(f"run my.yaml data.train={name} {also}", place, cure, prepare)


CONFIGURATIONS = {
    "key": config("adapter.rnk=3", "my.yaml has 1 mistake: adapter.rnk", "Did you mean `rank`?"),
    "section": config("trian.steps=3", "trian: unknown key", "Did you mean `train`?"),
    "several": config("sedd=1 batch.size=0 model.weights=int4", "my.yaml has 3 mistakes: model.weights", "'int8'"),
    "method": config("adapter.method=loar", "adapter.method: unknown method 'loar'.", "Did you mean `lora`?"),
    "format": config("data.format=sharegtp", "data.format: expected", "'sharegpt'"),
    "recipe": config("recipe=sftt", "recipe: expected", "'sft'"),
    "word": config("batch.size=ten", "batch.size", "expected a valid integer, found 'ten'"),
    "no steps": config("train.steps=0", "train.steps", "expected greater than 0, found 0"),
    "negative rate": config("train.learning_rate=-1", "train.learning_rate", "greater than 0"),
    "rate that is none": config("train.learning_rate=.nan", "train.learning_rate", "a finite number"),
    "whole dropout": config("adapter.dropout=1", "adapter.dropout", "less than 1"),
    "share above 1": config("data.held_out=2", "data.held_out", "less than 1 or a valid string"),
    "null": config("model.id=null", "model.id", "expected a valid string"),
    "no section": config("data=rows.jsonl", "data", "expected keys of its own, such as data.train"),
    "no data": config("'data={held_out: 0.1}'", "data.train", "is required"),
    "not a list": config("trackers=wandb", "trackers", "a list such as"),
    "tracker": config("trackers=[wandbb]", "trackers.0", "'tensorboard' or 'wandb'"),
    "tracker not installed": config("trackers=[wandb]", "trackers: wandb", "pip install 'peft-workbench[wandb]'"),
    "no target": config("adapter.targets=[]", "adapter.targets", "at least 1 item"),
    "unknown target": config("adapter.targets=[q_prj]", "adapter.targets: no linear layer", "Nearest: o_proj, q_proj"),
    "full with nf4": config(
        "'adapter={method: full}' model.weights=nf4", "adapter.method=full does not", "adapter.method=lora"
    ),
    "full with tokens": config("'adapter={method: full}' model.new_tokens=[<a>]", "model.new_tokens", "Able: adalora,"),
    "schedule": config("'schedule={name: wsd, warmup: 0.9}'", "schedule: warmup 0.9 and decay", "sum to 1 or less"),
    "patience": config("evaluate.patience=3", "evaluate.patience", "write save.ship=best as well"),
    "best of none": config("save.ship=best", "save.ship=best", "write evaluate.every=0.1"),
    "held-out is train": config("data.held_out=rows.jsonl", "data.held_out", "data.held_out=0.05"),
    "precisions": config("model.compute=bfloat16", "model.compute=bfloat16", "write model.weights=bfloat16 as well"),
    "flash on a CPU": config("model.attention=flash_attention_2", "model.attention", "Write model.attention=auto"),
    "flex on a CPU": config("model.attention=flex_attention", "model.attention", "Write model.attention=auto"),
    "known token": config("model.new_tokens=[</s>]", "model.new_tokens: </s> already in", "Leave them out"),
    "token twice": config("model.new_tokens=[<a>,<a>]", "model.new_tokens: <a>", "Name each token once"),
    "empty token": config("model.new_tokens=[\"''\"]", "model.new_tokens.0", "at least 1 character"),
    "small budget": config("batch.tokens_per_device=9", "batch.tokens_per_device: 9 is below", "write auto"),
    "exploding rate": config("train.learning_rate=1e9 train.steps=9", "at step 2", "Lower train.learning_rate"),
    "revision of a folder": config("model.revision=v2", "model.revision=v2", "Leave model.revision out"),
    "override without a value": config("train.steps", "'train.steps'", "expected key=value, such as train.epochs=3"),
    "override of a value's key": config("recipe.x=1", "`recipe` is 'sft'", "not a section"),
    "no file": Case("run none.yaml", "none.yaml: no such file", "`workbench ls recipes`"),
    "no recipe": Case("run sft/quikstart", "sft/quikstart: no such recipe", "Did you mean `sft/quickstart`?"),
    "folder": Case("check d.yaml", "d.yaml", "Name a YAML file", lambda folder: (folder / "d.yaml").mkdir()),
    "broken": Case("check my.yaml", "my.yaml: not valid YAML", "line 2", file("my.yaml", "recipe: sft\n\tseed: 0\n")),
    "key twice": Case("check my.yaml", "line 2", "`seed` stands twice", file("my.yaml", "seed: 0\nseed: 1\n")),
    "empty": Case("check my.yaml", "my.yaml: expected a mapping", "such as `recipe: sft`", file("my.yaml", "")),
    "not UTF-8": Case("check my.yaml", "my.yaml: cannot be read", "saved as UTF-8", file("my.yaml", b"a: \xff\n")),
}

DATA = {
    "missing": config("data.train=row.jsonl", "row.jsonl: no such file", "Did you mean `rows.jsonl`?"),
    "missing folder": config("data.train=no/row.jsonl", "the folder no does not exist", "looked for in"),
    "missing held-out": config("data.held_out=row.jsonl", "row.jsonl: no such file", "Did you mean `rows.jsonl`?"),
    "missing test": config("data.test=row.jsonl", "row.jsonl: no such file", "Did you mean `rows.jsonl`?"),
    "offline hub": config("data.train=nobody/nothing", "nobody/nothing: not cached", "HF_HUB_OFFLINE is set. Unset"),
    "kind": data("a", "bad.xyz: unknown kind of file", "Known: .jsonl", name="bad.xyz"),
    "empty": data("", "bad.jsonl: the file is empty", "name another one"),
    "blank": data("\n\n", "bad.jsonl: holds no rows", "name another one"),
    "not UTF-8": data(b'{"question": "caf\xe9"}', "byte 0xE9 at offset 17 (line 1)", "iconv -f latin1"),
    "cut jsonl": data('{"question": "a", "ans', "bad.jsonl, row 1: not valid JSON", "is the file cut off?"),
    "cut json": data('[{"question": "a"', "bad.json: not valid JSON", "is the file cut off?", name="bad.json"),
    "cut parquet": data("PAR1", "bad.parquet: not a parquet file", "Write it again", name="bad.parquet"),
    "array in jsonl": data("[{}]", "bad.jsonl: holds one JSON array", "Rename it to bad.json"),
    "lines in json": data('{"a": 1}\n{"a": 2}', "bad.json: holds one object per", "to bad.jsonl", name="bad.json"),
    "value in json": data("3", "bad.json: expected a list of objects", "found 3", name="bad.json"),
    "cells": data("question,answer\na,b,c\n", "row 1 (line 2): 3 cells", "Quote a cell", name="bad.csv"),
    "semicolons": data("question;answer\na;b\n", "the header is one column", "Write it with commas", name="bad.csv"),
    "open quote": data('question,answer\n"a,b\n', "bad.csv, row 1 (line 2)", "Close it", name="bad.csv"),
    "columns": data([{"a": "b", "c": "d"}], "its columns, `a`, `c`", "data.columns='{question: a, answer: c}'"),
    "named format": config("data.format=alpaca", "row 1: data.format alpaca needs", "Name the row's format"),
    "renamed column": config("'data.columns={prompt: qestion}'", "no column `qestion`", "Did you mean `question`?"),
    "wanted column": config("'data.columns={promt: question}'", "`promt` is no column of any format", "`prompt`?"),
    "number as label": data([{"text": "a", "label": 1}], "bad.jsonl, row 1: `label`", "map your classes to names"),
    "null answer": data([{"question": "a", "answer": None}], "row 1: `answer` is missing", "data.on_bad_row=skip"),
    "role": data([{"messages": [{"role": "usr", "content": "a"}]}], "message 1 of `messages`", "Did you mean `user`?"),
    "no answer": data([{"messages": [{"role": "user", "content": "a"}]}], "row 1: has no assistant", "Mend them"),
    "all rows bad": data([{"text": 1}], "none of its 1 rows", "write it in quotes", also="data.on_bad_row=skip"),
    "one row": data(ROWS[:1] * 3, "bad.jsonl: 1 distinct row", "a file of its own as data.held_out"),
    "overlap": Case(
        "run my.yaml data.held_out=held.jsonl",
        "rows.jsonl, row 4 equals held.jsonl, row 1",
        "data.overlap=drop",
        lines(ROWS[3:5], "held.jsonl"),
    ),
    "overlap with test": Case(
        "run my.yaml data.test=t.jsonl", "also stand in t.jsonl", "Write data.overlap=drop", lines(ROWS, "t.jsonl")
    ),
    "all rows too long": data(
        [{"question": "a " * 50, "answer": "b"}],
        "bad.jsonl, row 1: no supervised token is left",
        "change data.truncate",
        also="data.max_tokens=16 data.truncate=right",
    ),
    "no end of turn": data(
        [{"question": f"a{n}", "answer": "b " * 300} for n in range(9)],
        "bad.jsonl: no supervised token ends a turn",
        "Write data.truncate=left",
        also="data.max_tokens=60 data.truncate=right",
    ),
    "beyond the positions": data(
        [{"question": f"a{n}", "answer": "b " * 900} for n in range(9)],
        "but stories was made for at most 512",
        "Write data.max_tokens=512",
    ),
    "cache": Case(
        "check my.yaml",
        "rows.jsonl/tokens: cannot be written",
        "set WORKBENCH_CACHE to another folder",
        lambda folder: os.environ.update(WORKBENCH_CACHE="rows.jsonl"),
    ),
}

TEMPLATE = "run my.yaml model.chat_template=t.jinja"
LOAD = "run my.yaml model.id=./m"
BACKBONES = {
    "template missing": Case(TEMPLATE, "model.chat_template: t.jinja cannot be read", "path of a Jinja file"),
    "template broken": Case(
        TEMPLATE, "the chat template of stories, line 2", "Mend it", file("t.jinja", "\n{% for m in %}")
    ),
    "template without turns": Case(TEMPLATE, "chat template of stories writes", "generation %}", file("t.jinja", "Hi")),
    "template empty": Case(TEMPLATE, "chat template of stories writes", "{% generation %}", file("t.jinja", "")),
    "template refuses": Case(TEMPLATE, "row 1: the chat template of", "Change the row", file("t.jinja", "{{ 1 / 0 }}")),
    "missing": config("model.id=./none", "model.id: no folder ./none", "Write an existing folder"),
    "offline": config("model.id=nobody/nothing", "model.id=nobody/nothing", "hf download nobody/nothing"),
    "empty": Case(LOAD, "model.id=./m", "Save or fetch all of it", lambda folder: (folder / "m").mkdir()),
    "no config": Case(LOAD, "no config (config.json)", "fetch all of it", backbone(removed("m/config.json"))),
    "no tokenizer": Case(LOAD, "no tokenizer (tokenizer.json", "fetch all", backbone(removed("m/tokenizer.json"))),
    "no weights": Case(LOAD, "no weights (*.safetensors)", "fetch all of it", backbone(removed("m/model.safetensors"))),
    "pickle": Case(
        LOAD,
        "no weights (*.safetensors)",
        "fetch all of it",
        backbone(lambda folder: (folder / "m/model.safetensors").rename(folder / "m/pytorch_model.bin")),
    ),
    "cut weights": Case(LOAD, "damaged weights", "fetch all of it again", backbone(cut("m/model.safetensors"))),
    "layers missing": Case(
        LOAD,
        "18 of the tensors",
        "config.json that belong together",
        backbone(changed("m/config.json", num_hidden_layers=7)),
    ),
    "other sizes": Case(
        LOAD,
        "shapes that its config.json asks for",
        "that belong together",
        backbone(changed("m/config.json", hidden_size=128)),
    ),
    "broken config": Case(LOAD, "m/config.json", "fetch all of it again", backbone(file("m/config.json", "{"))),
    "broken tokenizer": Case(
        LOAD, "damaged tokenizer", "fetch all of it again", backbone(file("m/tokenizer.json", "{"))
    ),
    "no language model": Case(
        LOAD,
        "ViTConfig has no causal language model",
        "Take one that AutoModelForCausalLM",
        backbone(file("m/config.json", '{"model_type": "vit"}')),
    ),
    "quantised already": Case(
        LOAD,
        "model.id=./m: its weights are quantised already",
        "model.weights=nf4 quantises while loading",
        backbone(changed("m/config.json", quantization_config={"quant_method": "gptq", "bits": 4})),
    ),
    "nothing to quantise": Case(
        f"{LOAD} model.weights=int8",
        "model.weights=int8: the blocks of FalconForCausalLM hold no linear layers",
        "Write model.weights=bfloat16",
        backbone(
            changed("m/config.json", model_type="falcon", architectures=["FalconForCausalLM"], num_attention_heads=8)
        ),
    ),
    "unknown architecture": Case(
        LOAD,
        "does not know its architecture",
        "Update transformers",
        backbone(changed("m/config.json", model_type="nonesuch")),
    ),
}


def in_use(folder: Path) -> None:
    """A run directory that somebody works in: the lock is given back when the tests end."""
    (folder / "live").mkdir()
    fcntl.flock(os.open(folder / "live/run.lock", os.O_CREAT | os.O_RDWR), fcntl.LOCK_EX)


def exchanged(folder: Path) -> None:
    """A run whose backbone was exchanged for another one."""
    path = folder / "one/config.yaml"
    path.write_text(re.sub(r"id: .*", "id: starter", path.read_text(), count=1))


AGAIN = "run one/config.yaml --out one --resume"
MERGE = "merge one --out m"
GENERATE = "generate one Hi"
PREDICT = "predict one bad.jsonl --out a.csv"
WEIGHTS = "one/adapter/adapter_model.safetensors"
RUNS = {
    "below a file": Case("run my.yaml --out rows.jsonl/x", "rows.jsonl/x: cannot be written", "Write another folder"),
    "below /proc": Case("run my.yaml --out /proc/x", "/proc/x: cannot be written", "Write another folder"),
    "in use": Case("run my.yaml --out live", "live: another process works on this run", "another --out", in_use),
    "holds a run": Case("run my.yaml --out one", "one already holds a run", "Write --resume to continue it"),
    "nothing to resume": Case("run my.yaml --out two --resume", "two holds no run", "Leave --resume out"),
    "nothing to resume at all": Case("run my.yaml --resume", "runs/my holds no run", "Leave --resume out"),
    "another run": Case("run my.yaml --out one --resume", "train.steps: 30 there, 2 asked for", "another --out"),
    "broken config.yaml": Case(AGAIN, "one/config.yaml: not valid YAML", "line 1", file("one/config.yaml", "a: [")),
    "wrong config.yaml": Case(
        "run my.yaml --out one --resume",
        "one/config.yaml has 2 mistakes: data: is required",
        "sedd: unknown key",
        file("one/config.yaml", "recipe: sft\nsedd: 1"),
    ),
    "broken manifest": Case(AGAIN, "one/manifest.json: damaged", "Restore it", file("one/manifest.json", "{")),
    "broken scores": Case(AGAIN, "one/before.json: damaged", "Restore it", file("one/before.json", "{")),
    "no adapter": Case(MERGE, "one: no adapter", "Finish the run first", lambda path: shutil.rmtree("one/adapter")),
    "adapter without weights": Case(GENERATE, "one/adapter: adapter_model.safetensors", "Restore it", removed(WEIGHTS)),
    "adapter without config": Case(
        GENERATE, "one/adapter: adapter_config.json missing", "Restore it", removed("one/adapter/adapter_config.json")
    ),
    "adapter without tokenizer": Case(
        GENERATE, "one/adapter: tokenizer.json missing", "Restore it", removed("one/adapter/tokenizer.json")
    ),
    "cut adapter": Case(GENERATE, f"{WEIGHTS}: damaged", "Restore it, or train again", cut(WEIGHTS)),
    "broken adapter config": Case(
        GENERATE, "adapter_config.json: damaged", "or train again", file("one/adapter/adapter_config.json", "{")
    ),
    "another backbone": Case(GENERATE, "one/adapter: this adapter does not fit", "that it was trained on", exchanged),
    "no run": Case("generate stories Hi", "stories: not a run directory", "`workbench ls runs`"),
    "no answer length": Case(f"{GENERATE} --max-new-tokens 0", "--max-new-tokens", "greater than or equal to 1"),
    "merge: exists": Case("merge one --out stories", "stories exists already", "Name another folder"),
    "merge: below a file": Case("merge one --out my.yaml/x", "my.yaml/x: cannot be written", "name another place"),
    "merge: weights": Case(f"{MERGE} --weights float64", "--weights float64", "expected float32, bfloat16, float16"),
    "predict: suffix": Case("predict one rows.jsonl --out a.txt", "--out a.txt", ".csv, .jsonl, .parquet"),
    "predict: exists": Case("predict one rows.jsonl --out a.csv", "a.csv exists", "Name another", file("a.csv", "")),
    "predict: below a file": Case("predict one rows.jsonl --out my.yaml/a.csv", "my.yaml/a.csv", "name another place"),
    "predict: no file": Case("predict one row.jsonl --out a.csv", "row.jsonl: no such file", "`rows.jsonl`?"),
    "predict: no --out": Case("predict one rows.jsonl", "'--out'", "Missing option"),
    "predict: no rows": Case(PREDICT, "bad.jsonl: holds no rows", "name another one", file("bad.jsonl", "\n")),
    "predict: no question": Case(PREDICT, "bad.jsonl, row 1: `question`", "is empty", lines([{"question": ""}])),
    "predict: answer first": Case(
        PREDICT,
        "bad.jsonl, row 1: the answer comes first",
        "Write the question before it",
        lines([{"messages": [{"role": "assistant", "content": "a"}]}]),
    ),
    "evaluate: model": Case("evaluate one model.id=starter", "evaluate cannot change model", "Leave it out"),
    "evaluate: key": Case("evaluate one data.tst=a", "the command line has 1 mistake: data.tst", "Did you mean `test`"),
    "evaluate: no file": Case("evaluate one data.test=row.jsonl", "row.jsonl: no such file", "`rows.jsonl`?"),
    "compare: no run": Case("compare one stories", "stories: not a run directory", "`workbench ls runs`"),
    "compare: metrics": Case("compare one", "metrics.jsonl: damaged", "or delete it", file("one/metrics.jsonl", "{\n")),
    "compare: below a file": Case("compare one --out my.yaml/a.html", "my.yaml/a.html", "name another place"),
    "ls": Case("ls modles", "ls modles", "expected recipes, adapters or runs"),
    "cp: exists": Case("cp sft/quickstart my.yaml", "my.yaml exists already", "Name another file"),
    "cp: below a file": Case("cp sft/quickstart my.yaml/a.yaml", "my.yaml/a.yaml", "name another place"),
    "ls: json of recipes": Case("ls recipes --json", "ls recipes: --json", "with `workbench ls adapters` only"),
    "ls: settings of runs": Case("ls runs adapter.rank=2", "ls runs: --json and key=value", "Leave them out"),
    "ls: nothing": Case("ls cheese", "ls cheese", "expected recipes, adapters or runs"),
    "ls: key": Case("ls adapters adapter.rnk=2", "adapter.rnk: no method has this key", "Did you mean `rank`?"),
    "ls: method": Case("ls adapters adapter.method=loar", "adapter.method: unknown method", "Did you mean `lora`?"),
    "ls: section": Case("ls adapters modle.id=stories", "modle: unknown key", "Did you mean `model`?"),
    "ls: value": Case("ls adapters adapter.rank=0", "adapter.rank", "greater than 0, found 0"),
    "ls: not a section": Case("ls adapters adapter=lora", "adapter: expected keys", "such as adapter.method"),
    "ls: no backbone": Case("ls adapters model.id=./none", "model.id: no folder ./none", "Write an existing folder"),
    "ls: word": Case("ls adapters stories", "'stories': expected key=value", "such as train.epochs=3"),
    "cp: nothing": Case("cp none.yaml a.yaml", "none.yaml: no such file", "`workbench ls recipes`"),
    "verb": Case("evalute one", "'evalute'", "Try 'workbench -h'"),
    "option": Case("run my.yaml --ot x", "--ot", "--out"),
}
CASES = {
    f"{table}: {name}": case
    for table, cases in (("config", CONFIGURATIONS), ("data", DATA), ("backbone", BACKBONES), ("run", RUNS))
    for name, case in cases.items()
}


@pytest.fixture
def folder(tmp_path: Path, stories: str, trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORKBENCH_CACHE", os.environ["WORKBENCH_CACHE"])  # put back after a case that moves it
    file("my.yaml", RECIPE)(tmp_path)
    lines(ROWS, "rows.jsonl")(tmp_path)
    # The same on every machine: no accelerator, no wandb.
    monkeypatch.setattr("workbench.backbones.device", lambda: torch.device("cpu"))
    monkeypatch.setitem(sys.modules, "wandb", None)
    (tmp_path / "stories").symlink_to(stories)
    shutil.copytree(trained, tmp_path / "one")
    return tmp_path


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_mistake_is_told(
    case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case.prepare(folder)
    before = content(folder)
    monkeypatch.setattr(sys, "argv", ["workbench", *shlex.split(case.command)])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert ended.value.code == 2
    assert_told(case, told.out, told.err)
    assert_nothing_left(folder, before)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["config: several", "data: not UTF-8"])
def test_the_same_from_a_shell(name: str, folder: Path) -> None:
    case = CASES[name]
    case.prepare(folder)
    before = content(folder)
    command = [sys.executable, "-m", "workbench.cli", *shlex.split(case.command)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 2
    assert_told(case, ended.stdout, ended.stderr)
    assert_nothing_left(folder, before)


def assert_told(case: Case, out: str, err: str) -> None:
    told = " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err and out == "", err
    assert case.place in told and case.cure in told, told


def assert_nothing_left(folder: Path, before: dict[Path, bytes]) -> None:
    """What was there is as it was, and nothing is new but run directories that say that they failed."""
    after = content(folder)
    failed = [path for path in folder.rglob("manifest.json") if b'"status": "failed"' in path.read_bytes()]
    for path in before.keys() | after.keys():
        assert before.get(path) == after.get(path) or any(run.parent in path.parents for run in failed), path


def content(folder: Path) -> dict[Path, bytes]:
    """Every file that is not behind a link; locks, which are empty, say nothing."""
    paths = (Path(place) / name for place, _, names in os.walk(folder) for name in names)
    return {path: path.read_bytes() for path in paths if path.name != "run.lock"}
