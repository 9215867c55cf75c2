"""A run that was told how long it may take ends then, scored and with its schedule at its end, on a loaded machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import workbench
from tests.run_files import read_lines, read_scores, write_lines
from workbench.errors import ConfigError, ResumeError, Stopped
from workbench.recipes.load import load
from workbench.recipes.verbs.evaluate import evaluate
from workbench.recipes.verbs.run import run
from workbench.runs import deadline
from workbench.training.callbacks import Callback, Silent

WINDOW = 0.15
"""Share of its time that a run may leave unused while other processes come and go."""
LEAVING = 8.0
"""Seconds in which a process leaves where tests and other processes have every core several times over."""
BURN = "import time\nend = time.monotonic() + {seconds}\nwhile time.monotonic() < end: sum(range(10_000))"


FEW = ["data.limit=400", "data.held_out=0.1"]
"""Rows that are scored in three seconds, so that most of a short time is left to train."""


def command(out: Path, limit: float) -> list[str]:
    words = [*overrides(limit), *FEW, "save.every=2"]
    return [sys.executable, "-m", "workbench.cli.verbs", "run", "sft/quickstart", *words, "--out", str(out)]


def overrides(limit: float) -> list[str]:
    return [f"budget.time={limit:g}", "train.epochs=null", "evaluate.answers=8"]


@contextmanager
def busy(*, after: float, seconds: float) -> Iterator[None]:
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
    return read_lines(path) if path.exists() else []


def require_finished(out: Path) -> None:
    """Saved, scored, told, and beyond its schedule's peak, which is all that is sure where others slow it down."""
    assert json.loads((out / "manifest.json").read_text())["status"] == "done"
    assert (out / "adapter" / "adapter_model.safetensors").exists()
    scores = read_scores(out)
    assert set(scores) == {"before", "after"}, "nothing that depends on how fast the machine was"
    assert scores["after"]["loss"] < scores["before"]["loss"]
    assert (out / "report.html").exists()
    rates = [line["learning_rate"] for line in lines(out)]
    assert rates[-1] < max(rates)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_a_killed_run_ends_in_time_while_others_use_the_cores(tmp_path: Path) -> None:
    limit, out = 30.0, tmp_path / "run"
    began = time.monotonic()
    with (tmp_path / "told.txt").open("w") as told_file:
        first = subprocess.Popen(command(out, limit), stdout=subprocess.DEVNULL, stderr=told_file)
    while len(lines(out)) < 4 and first.poll() is None:
        time.sleep(0.05)
    if first.returncode in (0, 3):  # other tests left so little of the machine that few steps were trained
        assert (out / "adapter" / "adapter_model.safetensors").exists()
        return
    if first.returncode is not None:  # or none would be
        assert first.returncode == 2 and re.search(r"budget\.time=\d+", (tmp_path / "told.txt").read_text())
        return
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    spent = time.monotonic() - began
    told = json.loads((out / "clock.json").read_text())["spent_s"]
    assert spent - 2 < told <= spent + 0.1

    began = time.monotonic()
    words = [*command(out, limit), "--resume"]
    with busy(after=0.2 * limit, seconds=0.2 * limit):
        done = subprocess.run(words, capture_output=True, text=True, timeout=2 * limit)
    took = spent + time.monotonic() - began
    # While others use the cores nobody knows that they will leave: training ends early enough for slow scoring, or,
    # where the machine became slower still, the run says which scores there was no time for.
    assert took <= limit + LEAVING
    if done.returncode == 2:  # the first part was so slow that nothing is left: said before anything is trained
        assert "no time is left to train" in done.stderr and spent > limit / 2
        return
    assert took >= limit / 2
    if done.returncode == 3:
        assert "the machine became slow" in done.stderr
        assert (out / "adapter" / "adapter_model.safetensors").exists()
        return
    assert done.returncode == 0, done.stderr
    require_finished(out)
    with pytest.raises(ResumeError, match="its time is over"):
        workbench.run(out / "config.yaml", out=out, resume=True, quiet=True)


def test_a_budget_that_is_too_small_says_what_to_write(tmp_path: Path, stories: str) -> None:
    words = [*overrides(1.0), f"model.id={stories}", "data.limit=200"]
    with pytest.raises(ConfigError, match=r"Write budget\.time=\d+ or more"):
        workbench.run("sft/quickstart", words, out=tmp_path / "run", quiet=True)
    assert not lines(tmp_path / "run")
    assert not (tmp_path / "run" / "adapter").exists()


@dataclass
class Clock:
    """Time that goes on whenever somebody looks at it."""

    tick: float = 0.05
    now: float = 0.0

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


@dataclass
class SlowAtTheEnd(Silent):
    """Makes the machine slow when training is over."""

    clock: Clock

    def say(self, text: str) -> None:
        if text.startswith("Scoring what was saved"):
            self.clock.tick *= 40


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(deadline, "Deadline", partial(deadline.Deadline, clock=found))
    monkeypatch.setattr(deadline, "BEAT", 1e9)
    return found


def train(out: Path, stories: str, callback: Callback, *, limit: str = "25s", resume: bool = False) -> dict[str, Any]:
    """Scores of a run on a few rows."""
    words = ["data.limit=60", "data.max_tokens=64", "evaluate.answers=4", "evaluate.max_new_tokens=3", "batch.size=4"]
    given = [*words, f"model.id={stories}", "train.epochs=null", f"budget.time={limit}", "batch.tokens_per_device=256"]
    run(load("sft/quickstart", given), out=out, resume=resume, callback=callback, began=0.0)
    return read_scores(out)


@pytest.mark.slow
def test_no_score_depends_on_how_fast_the_machine_was(tmp_path: Path, short_stories: str, clock: Clock) -> None:
    scores = train(tmp_path / "run", short_stories, Silent())
    assert clock.now <= 25 and lines(tmp_path / "run")
    assert set(scores) == {"before", "after"}
    assert scores["after"] == evaluate(tmp_path / "run", [])


@pytest.mark.slow
def test_a_run_whose_time_is_over_while_it_is_scored_is_scored_later(
    tmp_path: Path, short_stories: str, clock: Clock
) -> None:
    out = tmp_path / "run"
    with pytest.raises(Stopped, match=r"Write budget\.time=\d+ or more .*\nContinue with: workbench run .* --resume"):
        train(out, short_stories, SlowAtTheEnd(clock))
    steps, saved = lines(out), (out / "adapter" / "adapter_model.safetensors").read_bytes()
    assert steps and not (out / "scores.json").exists()
    clock.tick = 0.05
    scores = train(out, short_stories, Silent(), limit="1h", resume=True)
    assert scores["after"] == evaluate(out, [])
    assert lines(out) == steps
    assert (out / "adapter" / "adapter_model.safetensors").read_bytes() == saved


PAIRS = """
recipe: prefer
model: {{id: {model}, weights: float32, compute: float32}}
adapter: {{method: lora, rank: 4, alpha: 8}}
data: {{train: {train}, held_out: 0.2, max_tokens: 64}}
batch: {{size: 4, tokens_per_device: 256}}
train: {{epochs: null, learning_rate: 5.0e-3}}
prefer: {{beta_end: 1.0}}
evaluate: {{every: 0.5, answers: 2, max_new_tokens: 3}}
"""


def test_preferences_end_in_time_at_the_end_of_their_schedules(
    tmp_path: Path, short_stories: str, clock: Clock
) -> None:
    """The reference reads within the time, and beta goes to its end as the learning rate does, by the clock's share."""
    rows = [{"prompt": f"After {n}?", "chosen": f" It is {n + 1}.", "rejected": " No idea."} for n in range(30)]
    write_lines(tmp_path / "pairs.jsonl", rows)
    (tmp_path / "recipe.yaml").write_text(PAIRS.format(model=short_stories, train=tmp_path / "pairs.jsonl"))
    out, config = tmp_path / "run", load(tmp_path / "recipe.yaml", ["budget.time=40s"])
    run(config, out=out, resume=False, callback=Silent(), began=0.0)
    require_finished(out)
    betas = [line["scale[beta]"] for line in lines(out)]
    assert clock.now <= 40 and len(betas) > 2
    assert betas == sorted(betas) and betas[0] == pytest.approx(0.1, abs=0.1) and 0.8 < betas[-1] <= 1
