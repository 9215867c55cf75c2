"""A run that was told how long it may take ends then, scored and with its schedule at its end, on a loaded machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import workbench
from workbench.errors import ConfigError, ResumeError

WINDOW = 0.03
BURN = "import time\nend = time.monotonic() + {seconds}\nwhile time.monotonic() < end: sum(range(10_000))"


def command(out: Path, limit: float) -> list[str]:
    words = [*overrides(limit), "save.every=2"]
    return [sys.executable, "-m", "workbench.cli.verbs", "run", "sft/quickstart", *words, "--out", str(out)]


def overrides(limit: float) -> list[str]:
    return [f"budget.time={limit:g}", "train.epochs=null", "evaluate.answers=8"]


@contextmanager
def load(*, after: float, seconds: float) -> Iterator[None]:
    """Other processes use every core for some of the time."""
    cores = len(os.sched_getaffinity(0))
    code = f"import time\ntime.sleep({after})\n" + BURN.format(seconds=seconds)
    burning = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(cores)]
    try:
        yield
    finally:
        for process in burning:
            process.kill()
            process.wait()


def lines(out: Path) -> list[dict[str, Any]]:
    path = out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def require_finished(out: Path) -> None:
    """Saved, scored, told, and at its schedule's end."""
    assert json.loads((out / "manifest.json").read_text())["status"] == "done"
    assert (out / "adapter" / "adapter_model.safetensors").exists()
    scores = json.loads((out / "scores.json").read_text())
    assert scores["after"]["loss"] < scores["before"]["loss"]
    assert (out / "report.html").exists()
    rates = [line["learning_rate"] for line in lines(out)]
    assert rates[-1] < 0.1 * max(rates)


@pytest.mark.slow
def test_a_killed_run_ends_in_time_while_others_use_the_cores(tmp_path: Path) -> None:
    limit, out = 80.0, tmp_path / "run"
    began = time.monotonic()
    first = subprocess.Popen(command(out, limit), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while len(lines(out)) < 4 and first.poll() is None:
        time.sleep(0.05)
    assert first.poll() is None
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    spent = time.monotonic() - began
    told = json.loads((out / "clock.json").read_text())["spent_s"]
    assert spent - 2 < told <= spent + 0.1

    began = time.monotonic()
    words = [*command(out, limit), "--resume"]
    with load(after=0.2 * limit, seconds=0.2 * limit):
        done = subprocess.run(words, capture_output=True, text=True, timeout=2 * limit)
    took = spent + time.monotonic() - began
    assert done.returncode == 0, done.stderr
    assert (1 - WINDOW) * limit <= took <= limit
    require_finished(out)
    with pytest.raises(ResumeError, match="its time is over"):
        workbench.run(out / "config.yaml", out=out, resume=True, quiet=True)


def test_a_budget_that_is_too_small_says_what_to_write(tmp_path: Path, stories: str) -> None:
    words = [*overrides(1.0), f"model.id={stories}", "data.limit=200"]
    with pytest.raises(ConfigError, match=r"Write budget\.time=\d+ or more"):
        workbench.run("sft/quickstart", words, out=tmp_path / "run", quiet=True)
    assert not lines(tmp_path / "run")
    assert not (tmp_path / "run" / "adapter").exists()
