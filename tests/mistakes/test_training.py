"""Mistakes in a recipe, its data or its backbone end in status 2 and a message with place and cure."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.mistakes.cases import (
    Case,
    assert_nothing_left,
    assert_refused,
    assert_told,
    backbone,
    changed,
    content,
    cut,
    file,
    lines,
    refusal,
    removed,
)
from tests.mistakes.conftest import ROWS


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
    "recipe": config("recipe=sftt", "recipe: unknown recipe 'sftt'", "Did you mean `sft`"),
    "word": config("batch.size=ten", "batch.size", "expected a valid integer, found 'ten'"),
    "no steps": config("train.steps=0", "train.steps", "expected greater than 0, found 0"),
    "negative rate": config("train.learning_rate=-1", "train.learning_rate", "greater than 0"),
    "rate that is none": config("train.learning_rate=.nan", "train.learning_rate", "a finite number"),
    "whole dropout": config("adapter.dropout=1", "adapter.dropout", "less than 1"),
    "share above 1": config("data.held_out=2", "data.held_out", "less than 1 or a valid string"),
    "batch statistics": config(
        "model.batch_norm=trained",
        "would depend on batch.tokens_per_device",
        "Write model.batch_norm=frozen. Factors and biases train with adapter.method=layernorm",
    ),
    "null": config("model.id=null", "model.id", "expected a valid string"),
    "no section": config("data=rows.jsonl", "data", "expected keys of its own, such as data.train"),
    "no data": config("'data={held_out: 0.1}'", "data.train", "is required"),
    "not a list": config("trackers=wandb", "trackers", "a list such as"),
    "tracker": config("trackers=[wandbb]", "trackers.0", "'mlflow', 'trackio' or 'swanlab'"),
    "tracker not installed": config("trackers=[wandb]", "trackers: wandb", "pip install 'peft-workbench[wandb]'"),
    "no target": config("adapter.targets=[]", "adapter.targets", "at least 1 item"),
    "unknown target": config("adapter.targets=[q_prj]", "adapter.targets: no linear layer", "Nearest: o_proj, q_proj"),
    "full with nf4": config(
        "'adapter={method: full}' model.weights=nf4", "adapter.method=full does not", "adapter.method=lora"
    ),
    "full with tokens": config("'adapter={method: full}' model.new_tokens=[<a>]", "model.new_tokens", "Able: adalora,"),
    "schedule": config("'schedule={name: wsd, warmup: 0.9}'", "schedule: warmup 0.9 and decay", "sum to 1 or less"),
    "part of what is cut": config(
        "train.checkpointing=elementwise distributed.zero=3", "DeepSpeed has given away", "distributed.engine=fsdp2"
    ),
    "part of what is compiled": config(
        "train.checkpointing=0.5 train.compile=true",
        "checkpointing=0.5 is left to torch.compile",
        "train.compile=false",
    ),
    "share of blocks above 1": config("train.checkpointing=1.5", "train.checkpointing", "less than 1"),
    "patience": config("evaluate.patience=3", "evaluate.patience", "write save.ship=best as well"),
    "one is no share": config("evaluate.every=1.0", "evaluate.every", "less than 1, found 1.0"),
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
    "key twice": Case("check my.yaml", "line 2", 'duplicate key "seed"', file("my.yaml", "seed: 0\nseed: 1\n")),
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
    "not UTF-8": data(b'{"question": "caf\xe9"}', "byte 0xE9 at offset 17 (line 1)", "Write data.encoding=latin1"),
    "cut jsonl": data('{"question": "a", "ans', "bad.jsonl, row 1: not valid JSON", "is the file cut off?"),
    "cut json": data('[{"question": "a"', "bad.json: not valid JSON", "is the file cut off?", name="bad.json"),
    "cut parquet": data("PAR1", "bad.parquet: not a parquet file", "Write it again", name="bad.parquet"),
    "array in jsonl": data("[{]", "bad.jsonl: not valid JSON", "column 3"),
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
    "no answer": data([{"messages": [{"role": "user", "content": "a"}]}], "row 1: has no assistant", "Correct them"),
    "all rows bad": data([{"text": 1}], "none of its 1 rows", "write it in quotes", also="data.on_bad_row=skip"),
    "one row": data(ROWS[:1] * 3, "bad.jsonl: 1 distinct row", "a file of its own as data.held_out"),
    "overlap": Case(
        "run my.yaml data.held_out=held.jsonl",
        "rows.jsonl, row 4 equals held.jsonl, row 1",
        "data.overlap=drop",
        lines(ROWS[3:5], "held.jsonl"),
    ),
    "overlap with test": Case(
        "run my.yaml data.test=t.jsonl", "are also in t.jsonl", "Write data.overlap=drop", lines(ROWS, "t.jsonl")
    ),
    "all rows too long": data(
        [{"question": "a " * 50, "answer": "b"}],
        "bad.jsonl, row 1: no supervised token is left",
        "(100%). Write data.max_tokens=70 or more",
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
        TEMPLATE, "the chat template of stories, line 2", "Correct it", file("t.jinja", "\n{% for m in %}")
    ),
    "template without turns": Case(TEMPLATE, "chat template of stories writes", "generation %}", file("t.jinja", "Hi")),
    "template empty": Case(TEMPLATE, "chat template of stories writes", "{% generation %}", file("t.jinja", "")),
    "template refuses": Case(TEMPLATE, "row 1: the chat template of", "Change the row", file("t.jinja", "{{ 1 / 0 }}")),
    "missing": config("model.id=./none", "model.id: no folder ./none", "Write model.id=FOLDER with one that exists"),
    "offline": config("model.id=nobody/nothing", "model.id=nobody/nothing", "hf download nobody/nothing"),
    "empty": Case(LOAD, "model.id=./m", "Save or fetch all of it", lambda folder: (folder / "m").mkdir()),
    "no config": Case(LOAD, "no config (config.json)", "fetch all of it", backbone(removed("m/config.json"))),
    "no tokenizer": Case(LOAD, "no tokenizer (tokenizer.json", "fetch all", backbone(removed("m/tokenizer.json"))),
    "no weights": Case(LOAD, "no weights (*.safetensors)", "fetch all of it", backbone(removed("m/model.safetensors"))),
    "pickle": Case(
        LOAD,
        "its weights are pytorch_model.bin, a pickle",
        "Take a copy with model.safetensors",
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
        backbone(changed("m/config.json", quantization_config={"quant_method": "spqr", "bits": 3})),
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

CASES = {
    f"{table}: {name}": case
    for table, cases in (("config", CONFIGURATIONS), ("data", DATA), ("backbone", BACKBONES))
    for name, case in cases.items()
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_mistake_is_told(
    case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if case in CONFIGURATIONS.values():
        case.prepare(folder)
        if told := refusal(case.command.partition(" ")[2]):
            assert case.place in told and case.cure in told, told
            return
    assert_refused(case, folder, monkeypatch, capsys)


@pytest.mark.parametrize("verb", ["check", "plan", "run"])
@pytest.mark.parametrize("name", ["key", "several", "no data", "unknown target", "small budget"])
def test_verbs_refuse_alike(
    name: str, verb: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = CONFIGURATIONS[name]
    words = case.command.partition(" ")[2]
    assert_refused(case._replace(command=f"{verb} {words}"), folder, monkeypatch, capsys)


@pytest.mark.nightly(but=["config: several"])
@pytest.mark.slow
@pytest.mark.parametrize("name", ["config: several", "data: not UTF-8"])
def test_the_same_from_a_shell(name: str, folder: Path) -> None:
    case = CASES[name]
    case.prepare(folder)
    before = content(folder)
    command = [forked.python(), "-m", "workbench.cli.verbs", *shlex.split(case.command)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 2
    assert_told(case, ended.stdout, ended.stderr)
    assert_nothing_left(folder, before)
