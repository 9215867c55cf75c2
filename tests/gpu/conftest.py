"""Fixtures of the tests of an accelerator: the CPU beside it, and a line for each test as it ends."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import trains
from workbench.models import backbones

RECIPE = """
recipe: sft
model: {{id: {model}, weights: float32, compute: float32}}
adapter: {{method: lora, rank: 4, alpha: 8}}
data: {{train: {train}, held_out: 0.1}}
batch: {{size: 8}}
train: {{steps: 6, learning_rate: 2.0e-3}}
evaluate: {{every: null, answers: 0}}
save: {{every: 3, keep: 3}}
"""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append a line to the file that WORKBENCH_GPU_RESULTS names, so that a machine that goes away leaves them."""
    path = os.environ.get("WORKBENCH_GPU_RESULTS")
    if path and "PYTEST_XDIST_WORKER" not in os.environ and (report.when == "call" or report.outcome != "passed"):
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")[-2000:]
        line = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line | ({"reason": reason} if reason else {})) + "\n")


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[None]]:
    """Gives a block inside of which the CPU is this process's device."""

    @contextmanager
    def block() -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(backbones, "device", lambda: torch.device("cpu"))
            yield

    return block


@pytest.fixture
def train(tmp_path: Path, short_stories: str, questions: Path) -> Callable[..., Path]:
    """Trains two blocks of stories260K with LoRA, and what overrides say; gives the run directory."""
    return trains(tmp_path, RECIPE, model=short_stories, train=questions)


def records(run: Path) -> list[dict[str, Any]]:
    """Lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def losses(run: Path) -> list[float]:
    """Losses of its steps."""
    return [record["loss"] for record in records(run)]
