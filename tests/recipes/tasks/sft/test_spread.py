"""Folds and members of sweeps trained by two processes, a share each: what comes out is what one process finds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from safetensors.torch import load_file

from tests import forked
from tests.conftest import MINILM, save_tiny, write_questions
from tests.recipes.weather import weather, write
from workbench.config.yaml_text import dump_yaml

pytestmark = pytest.mark.slow

STEPS = 8
RATES = (1e-3, 2e-2, 1e30)
"""The last one is a mistake."""


def start(recipe: Path, out: Path, *words: str) -> subprocess.Popen[str]:
    command = [forked.python(), "-m", "workbench.cli.verbs", "run", str(recipe), "--out", str(out), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(recipe: Path, out: Path, *words: str) -> str:
    running = start(recipe, out, *words)
    said, _ = running.communicate(timeout=300)
    assert running.returncode == 0, said
    return said


def has_a_checkpoint(out: Path) -> bool:
    """Walk with `os.walk`, which passes over a folder that is renamed meanwhile, where `rglob` raises."""
    return any(name.startswith("step-") for _, names, _ in os.walk(out) for name in names)


def stop_at_a_checkpoint(recipe: Path, out: Path, *words: str) -> None:
    """End a run of two processes politely as soon as one of its members has a checkpoint."""
    running = start(recipe, out, *words, "--devices", "2")
    try:
        while not has_a_checkpoint(out):
            assert running.poll() is None
            time.sleep(0.05)
        running.send_signal(signal.SIGTERM)
        said, _ = running.communicate(timeout=60)
    finally:
        running.kill()
        running.communicate()
    assert running.returncode == 3, said
    assert "--resume" in said and "Traceback" not in said


@pytest.fixture(scope="module")
def folds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cross-validation of three folds with every stage, one adapter after another: then their bits are their own."""
    folder = tmp_path_factory.mktemp("folds")
    save_tiny(folder / "model", "Bert", "SequenceClassification", MINILM)
    write(folder / "train.jsonl", weather(60, seed=0, wrong=0.1))
    write(folder / "test.jsonl", weather(30, seed=1, wrong=0.1))
    write(folder / "more.jsonl", [{"text": row["text"]} for row in weather(45, seed=2)])
    recipe = {
        "recipe": "crossval",
        "model": {"id": str(folder / "model"), "weights": "float32"},
        "adapter": {"method": "lora", "rank": 8},
        "data": {"train": str(folder / "train.jsonl"), "test": str(folder / "test.jsonl")},
        "folds": {"k": 3, "together": False, "refit": True},
        "train": {"steps": STEPS, "learning_rate": 1e-2},
        "batch": {"size": 8},
        "save": {"every": 4},
        "pseudo_label": {"unlabelled": str(folder / "more.jsonl"), "threshold": 0.3, "rounds": 1},
        "tta": {"views": ["typos"], "merge": "mean"},
        "correction": {"neighbours": 3, "strength": 0.2},
    }
    (folder / "recipe.yaml").write_text(dump_yaml(recipe))
    return folder / "recipe.yaml"


def stages(run: Path) -> Any:
    """What a run decided, without its times and without the command that decides otherwise."""
    found = json.loads((run / "stages.json").read_text())
    told = [{**stage, "seconds": None, "why": stage["why"].partition(" To keep it")[0]} for stage in found["stages"]]
    return {**found, "stages": told}


def test_folds_on_two_devices_say_what_they_say_on_one(folds: Path, tmp_path: Path) -> None:
    finish(folds, tmp_path / "one")
    stop_at_a_checkpoint(folds, tmp_path / "two")
    finish(folds, tmp_path / "two", "--devices", "2", "--resume")
    for name in ("out_of_fold.parquet", "predictions.parquet"):
        found, wanted = (pd.read_parquet(tmp_path / run / name) for run in ("two", "one"))
        pd.testing.assert_frame_equal(found, wanted, check_exact=True)
    assert stages(tmp_path / "two") == stages(tmp_path / "one")
    adapters = sorted(
        each.relative_to(tmp_path / "one") for each in (tmp_path / "one").rglob("adapter_model.safetensors")
    )
    assert len(adapters) >= 8  # three folds, twice, and all rows: in members/ and shipped
    for adapter in adapters:
        found, wanted = (load_file(tmp_path / run / adapter) for run in ("two", "one"))
        assert all(found[name].equal(wanted[name]) for name in wanted)
    assert (tmp_path / "two" / "report.html").exists()


@pytest.mark.nightly
def test_members_on_two_devices_are_those_of_one(tmp_path: Path, short_stories: str) -> None:
    train = write_questions(tmp_path / "train.jsonl", [f"{n + 1}" + " it is" * (n % 7) for n in range(60)])
    held_out = write_questions(tmp_path / "held_out.jsonl", [f"It is {n + 1}, surely." for n in range(9)])
    recipe = {
        "recipe": "sweep",
        "model": {"id": short_stories, "weights": "float32", "compute": "float32"},
        "adapter": {"method": "lora", "rank": 4, "alpha": 8},
        "data": {"train": str(train), "held_out": str(held_out), "overlap": "drop"},
        "batch": {"size": 6},
        "train": {"steps": STEPS},
        "evaluate": {"every": 4, "answers": 3, "max_new_tokens": 4},
        "save": {"every": 4},
        "sweep": {"over": {"train.learning_rate": list(RATES)}},
    }
    (tmp_path / "recipe.yaml").write_text(dump_yaml(recipe))
    finish(tmp_path / "recipe.yaml", tmp_path / "one")
    stop_at_a_checkpoint(tmp_path / "recipe.yaml", tmp_path / "two")
    finish(tmp_path / "recipe.yaml", tmp_path / "two", "--devices", "2", "--resume")
    found, wanted = (json.loads((tmp_path / run / "sweep.json").read_text()) for run in ("two", "one"))
    assert found["best"] == wanted["best"]
    assert sorted(row["status"] for row in found["members"]) == ["done"] * 2 + ["failed"]
    for mine, other in zip(found["members"], wanted["members"], strict=True):
        assert (mine["member"], mine["status"], mine["steps"]) == (other["member"], other["status"], other["steps"])
        if other["status"] == "done":
            assert mine["held_out_loss"] == pytest.approx(other["held_out_loss"], rel=1e-4)
            assert mine["scores"]["after"] == pytest.approx(other["scores"]["after"], rel=1e-3)
    scores = [json.loads((tmp_path / run / "scores.json").read_text())["after"]["loss"] for run in ("two", "one")]
    assert scores[0] == pytest.approx(scores[1], rel=1e-4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--devices", "2", "folds.k=3", "distributed.zero=3"], "correction reads rows by a backbone that is whole"),
        pytest.param(
            ["--devices", "2", "budget.time=100s", "train.steps=null"], "budget.time", marks=pytest.mark.nightly
        ),
    ],
)
def test_what_cannot_be_spread_is_refused(folds: Path, tmp_path: Path, words: list[str], message: str) -> None:
    running = start(folds, tmp_path / "run", *words)
    told, _ = running.communicate(timeout=120)
    assert running.returncode == 2 and message in told and "Traceback" not in told
