"""Where mistakes are made."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from tests.mistakes.cases import file, lines

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


@pytest.fixture
def folder(tmp_path: Path, stories: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a command, without a run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORKBENCH_CACHE", os.environ["WORKBENCH_CACHE"])  # put back after a case that moves it
    file("my.yaml", RECIPE)(tmp_path)
    lines(ROWS, "rows.jsonl")(tmp_path)
    # The same on every machine: no accelerator, no wandb.
    monkeypatch.setattr("workbench.models.backbones.device", lambda: torch.device("cpu"))
    monkeypatch.setitem(sys.modules, "wandb", None)
    (tmp_path / "stories").symlink_to(stories)
    return tmp_path
