"""Mistakes with runs, and with verbs that read them, end in status 2 and a message with place and cure."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.mistakes.cases import AssertRefused, Case, cut, file, lines, removed


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
    "holds a run": Case(
        "run my.yaml --out one",
        "one already holds a run",
        "`workbench run my.yaml --out one --resume`",
    ),
    "nothing to resume": Case("run my.yaml --out two --resume", "two holds no run", "Leave --resume out"),
    "nothing to resume at all": Case("run my.yaml --resume", "runs/my holds no run", "Leave --resume out"),
    "another run": Case("run my.yaml --out one --resume", "train.steps: 30 there, 2 asked for", "another --out"),
    "broken config.yaml": Case(AGAIN, "one/config.yaml: not valid YAML", "line 1", file("one/config.yaml", "a: [")),
    "wrong config.yaml": Case(
        "run my.yaml --out one --resume",
        "one: this version of the workbench does not read its config.yaml",
        "Use that version, or train again",
        file("one/config.yaml", "recipe: sft\nsedd: 1"),
    ),
    "config.yaml of another version": Case(
        "evaluate one",
        "one: this version of the workbench does not read its config.yaml",
        "sedd: unknown key. Did you mean `seed`? Use that version, or train again",
        file("one/config.yaml", "recipe: sft\nsedd: 1\ndata: {train: a}"),
    ),
    "compare: another version": Case(
        "compare one",
        "one: this version of the workbench does not read its config.yaml",
        "Use that version, or train again",
        file("one/config.yaml", "recipe: distill\nmodel: stories"),
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
    "evaluate: epochs": Case("evaluate one train.epochs=3", "evaluate trains nothing, and train is", "Leave it out"),
    "evaluate: model": Case("evaluate one model.weights=nf4", "evaluate cannot change model", "Leave it out"),
    "another backbone given": Case("evaluate one model.id=starter", "this adapter does not fit", "it was trained on"),
    **{
        f"moved backbone: {command}": Case(
            f"{command} model.id=/gone", "model.id: no folder /gone", "Write model.id=FOLDER"
        )
        for command in ("evaluate one", "generate one Hi", "merge one --out m", "export one --to peft --out m")
    },
    "no setting of a run": Case("generate one Hi adapter.rank=2", "one is read as it was trained", "leave everything"),
    "evaluate: key": Case("evaluate one data.tst=a", "the command line has 1 mistake: data.tst", "Did you mean `test`"),
    "evaluate: no file": Case("evaluate one data.test=row.jsonl", "row.jsonl: no such file", "`rows.jsonl`?"),
    "compare: no run": Case("compare one stories", "stories: not a run directory", "`workbench ls runs`"),
    "compare: metrics": Case("compare one", "metrics.jsonl: damaged", "or delete it", file("one/metrics.jsonl", "{\n")),
    "compare: below a file": Case("compare one --out my.yaml/a.html", "my.yaml/a.html", "name another place"),
    "ls": Case("ls modles", "ls modles", "Did you mean `models`?"),
    "cp: exists": Case("cp sft/quickstart my.yaml", "my.yaml exists already", "Name another file"),
    "cp: below a file": Case("cp sft/quickstart my.yaml/a.yaml", "my.yaml/a.yaml", "name another place"),
    "ls: json of recipes": Case("ls recipes --json", "ls recipes: --json", "with `workbench ls adapters` only"),
    "ls: settings of runs": Case("ls runs adapter.rank=2", "ls runs: --json and key=value", "Leave them out"),
    "ls: nothing": Case("ls cheese", "ls cheese", "expected recipes, a group of them such as sft, adapters or runs"),
    "ls: key": Case("ls adapters adapter.rnk=2", "adapter.rnk: no method has this key", "Did you mean `rank`?"),
    "ls: method": Case("ls adapters adapter.method=loar", "adapter.method: unknown method", "Did you mean `lora`?"),
    "ls: section": Case("ls adapters modle.id=stories", "modle: unknown key", "Did you mean `model`?"),
    "ls: value": Case("ls adapters adapter.rank=0", "adapter.rank", "greater than 0, found 0"),
    "ls: not a section": Case("ls adapters adapter=lora", "adapter: expected keys", "such as adapter.method"),
    "ls: no backbone": Case(
        "ls adapters model.id=./none", "model.id: no folder ./none", "Write model.id=FOLDER with one that exists"
    ),
    "ls: word": Case("ls adapters stories", "'stories': expected key=value", "such as train.epochs=3"),
    "cp: nothing": Case("cp none.yaml a.yaml", "none.yaml: no such file", "`workbench ls recipes`"),
    "plan: memory": Case("plan my.yaml --memory much", "--memory much", "such as 24GB"),
    "plan: host": Case("plan my.yaml --host-memory much", "--host-memory much", "such as 24GB"),
    "plan: card": Case("plan my.yaml --device a100", "there is no card 'a100'", "Write a100-40gb or a100-80gb"),
    "plan: recipe": Case("plan crossval/quickstart folds.together=false", "recipe=crossval", "Plan one of them"),
    "plan: nothing learnt": Case(
        "plan my.yaml data.train=empty.jsonl", "empty.jsonl", "the file is empty", file("empty.jsonl", "")
    ),
    "plan: word": Case("plan my.yaml train.stesp=1", "train.stesp", "Did you mean `steps`?"),
    "verb": Case("evalute one", "'evalute'", "Try 'workbench -h'"),
    "option": Case("run my.yaml --ot x", "--ot", "--out"),
}


@pytest.fixture(autouse=True)
def one(folder: Path, trained: Path) -> Path:
    """A finished run."""
    return shutil.copytree(trained, folder / "one")


@pytest.mark.parametrize("case", RUNS.values(), ids=[f"run: {name}" for name in RUNS])
def test_a_mistake_is_told(case: Case, assert_refused: AssertRefused) -> None:
    assert_refused(case)
