"""Layers that train, step by step, as a run writes them: what its policy says, also after it was resumed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import trains
from tests.run_files import read_lines
from workbench.config.freeze_config import Moment
from workbench.runs import run_directory

RECIPE = """
recipe: sft
model: {{id: {model}, weights: float32}}
adapter: {{method: lora, rank: 2}}
data: {{train: {train}, held_out: 0.1}}
batch: {{size: 4}}
train: {{steps: 8, learning_rate: 1.0e-2}}
freeze: {{policy: lisa, active: 1, every: 2}}
evaluate: {{every: null, answers: 0}}
save: {{every: 3, keep: 9}}
"""


@pytest.fixture
def run(tmp_path: Path, stories: str, questions: Path) -> Callable[..., Path]:
    return trains(tmp_path, RECIPE, model=stories, train=questions)


def _lines(path: Path) -> list[dict[str, Any]]:
    return read_lines(path / "layers.jsonl")


def test_each_change_is_what_the_policy_says(run: Callable[..., Path]) -> None:
    path = run()
    first, *others = _lines(path)
    assert [each["name"] for each in first["layers"]][:2] == ["before the blocks", "block 1"]
    config = run_directory.read_config(path)
    plans = [config.freeze.plan(Moment(step, step / 8, config.seed), blocks=5).trains for step in range(8)]
    digits = ["".join(str(int(each)) for each in plan) for plan in plans]
    expected = [(step + 1, now) for step, now in enumerate(digits) if step and now != digits[step - 1]]
    assert first["trains"] == digits[0] and [(each["step"], each["trains"]) for each in others] == expected
    assert expected


def test_a_resumed_run_goes_on_where_its_checkpoint_is(run: Callable[..., Path]) -> None:
    straight = run()
    text = (straight / "layers.jsonl").read_bytes()
    for name in ("checkpoints/step-00000008", "checkpoints/step-00000006", "adapter"):
        shutil.rmtree(straight / name)
    (straight / "layers.jsonl").write_bytes(text + b'{"step": 9, "tra')
    resumed = run(resume=True)
    assert (resumed / "layers.jsonl").read_bytes() == text


def test_a_table_that_was_half_written_is_written_again(run: Callable[..., Path]) -> None:
    path = run("freeze={policy: none}", "train.steps=2")
    text = (path / "layers.jsonl").read_bytes()
    shutil.rmtree(path / "adapter")
    (path / "layers.jsonl").write_bytes(text[:50])
    assert (run("freeze={policy: none}", "train.steps=2", resume=True) / "layers.jsonl").read_bytes() == text


def test_without_a_policy_there_is_one_line(run: Callable[..., Path]) -> None:
    (line,) = _lines(run("freeze={policy: none}", "train.steps=2"))
    assert set(line["trains"]) == {"1"} and line["step"] == 0
