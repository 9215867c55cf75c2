"""Mistakes that need no model are told before torch is imported, by a process of their own."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from workbench.cli.verbs import main

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.exit("torch is imported")

sys.meta_path.insert(0, NoTorch())
main()
"""
RECIPE = "recipe: sft\nmodel: {id: starter}\ndata: {train: rows.jsonl, held_out: 0.2}\n"
FILES = {
    "number.jsonl": [{"question": "How many?", "answer": 3}],
    "labelled.jsonl": [{"text": f"text {n}", "label": "ab"[n % 2]} for n in range(8)] + [{"text": "no label"}],
    "alike.jsonl": [{"text": f"text {n}", "label": "a"} for n in range(8)],
    "texts.jsonl": [{"text": 3}],
    "pairs.jsonl": [{"prompt": "a", "chosen": "b", "rejected": "b"}],
    "steps.jsonl": [{"prompt": "a", "completions": ["b"], "labels": [3]}],
    "anchors.jsonl": [{"anchor": "", "positive": "b"}],
    "tags.jsonl": [{"words": ["a"], "tags": []}],
    "large.jsonl": [{"question": "x" * 2000, "answer": "y"}] * 600 + [{"question": "x"}] + [{"question": "x"}] * 5,
    "rows.jsonl": [{"question": f"What comes after {n}?", "answer": f"It is {n + 1}."} for n in range(12)],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("run my.yaml data.train=number.jsonl", "`answer` must be a string"),
        ("check my.yaml data.train=number.jsonl", "`answer` must be a string"),
        ("plan my.yaml data.train=number.jsonl", "`answer` must be a string"),
        ("lr my.yaml data.held_out=number.jsonl", "`answer` must be a string"),
        ("run my.yaml data.train=large.jsonl", "has 5 malformed rows among the first 605, where reading stopped"),
        ("run my.yaml data.train=cut.jsonl", "is the file cut off?"),
        ("run my.yaml 'data.columns={question: qestion}'", "no column `qestion`"),
        ("run my.yaml recipe=mlm data.train=texts.jsonl", "`text` must be a string"),
        ("run my.yaml recipe=classify data.train=labelled.jsonl", "the row has no label"),
        ("run my.yaml recipe=classify data.train=alike.jsonl", "alike.jsonl: "),
        ("run my.yaml recipe=prefer data.train=pairs.jsonl", "pairs.jsonl, row 1"),
        ("run my.yaml recipe=reward data.train=pairs.jsonl", "pairs.jsonl, row 1"),
        ("run my.yaml recipe=reward reward.kind=process data.train=steps.jsonl", "that of step 1"),
        ("run my.yaml recipe=embed data.train=anchors.jsonl", "`anchor`"),
        ("run my.yaml recipe=tag data.train=tags.jsonl", "tags.jsonl"),
        ("run my.yaml --out rows.jsonl/x", "cannot be written"),
        (f"run my.yaml --out {'a' * 260}", "cannot be written (File name too long)"),
        ("run my.yaml --out two --resume", "holds no run to resume"),
        ("run my.yaml distributed.tensor=2", "makes groups of 2 devices"),
        ("check my.yaml distributed.zero=2 optimizer.name=muon", "optimizer.name=muon"),
        ("run my.yaml distributed.deepspeed=none.json", "cannot be read"),
        ("run my.yaml budget.time=slurm", "this is no Slurm job"),
        ("generate none Hi", "not a run directory"),
        ("merge none --out merged", "not a run directory"),
        ("evaluate done dta.test=rows.jsonl", "Did you mean `data`?"),
        ("predict done rows.jsonl train.steps=3 --out said.jsonl", "predict trains nothing"),
        ("predict done row.jsonl --out said.jsonl", "Did you mean `rows.jsonl`?"),
    ],
)
def test_torch_is_not_imported(command: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(RECIPE)
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "config.yaml").write_text(RECIPE)
    (tmp_path / "cut.jsonl").write_text('{"question": "a", "answer": "b"}\n{"question": "a", "ans')
    for name, rows in FILES.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = sorted(tmp_path.iterdir())
    words = [sys.executable, "-c", PROGRAM, *shlex.split(command)]
    root = str(Path(__file__).parents[2])
    ended = subprocess.run(words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True)
    assert told in ended.stderr and ended.returncode == 2, ended.stderr
    assert sorted(tmp_path.iterdir()) == before, "nothing is left"
