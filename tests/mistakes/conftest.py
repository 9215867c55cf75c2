"""Where mistakes are made."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.mistakes import cases
from tests.mistakes.cases import AssertRefused, AssertRowsRefused, RowsCase, file, lines, trained

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


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["told", "retried"])
def retried(request: pytest.FixtureRequest) -> bool:
    """Whether what a message says to write is tried: the slow line does."""
    return bool(request.param)


@pytest.fixture
def assert_refused(
    folder: Path, retried: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> AssertRefused:
    """Make a mistake in the folder, and see that it is told and leaves nothing."""
    return partial(cases.assert_refused, folder=folder, monkeypatch=monkeypatch, capsys=capsys, retried=retried)


@pytest.fixture(scope="module")
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, stories: str) -> Path:
    """A run of the module's RECIPE on its ROWS. Read only."""
    return trained(request.module.RECIPE, request.module.ROWS, tmp_path_factory.mktemp("finished"), stories)


@pytest.fixture
def assert_rows_refused(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    stories: str,
    retried: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> AssertRowsRefused:
    """Make a mistake with the module's RECIPE, beside the backbone and other links, and see that it is told."""

    def refused(case: RowsCase, **links: str | Path) -> None:
        links = {"stories": stories, **links}
        cases.assert_rows_refused(case, request.module.RECIPE, links, tmp_path, monkeypatch, capsys, retried=retried)

    return refused
