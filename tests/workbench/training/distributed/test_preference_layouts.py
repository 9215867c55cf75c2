"""Recipe prefer in two processes: the reference's numbers, kto's reference point and losses are those of one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import workbench
from tests.conftest import cells
from tests.workbench.training.distributed import layouts
from workbench.config.yaml_text import dump_yaml

pytestmark = pytest.mark.slow

FSDP = "{engine: fsdp2, zero: 3}"
JOBS = {
    "dpo ddp": ["distributed={zero: 0}"],
    "dpo zero2": ["distributed={zero: 2}"],
    "dpo zero3": ["distributed={zero: 3}"],
    "dpo fsdp2": [f"distributed={FSDP}"],
    "kto zero2": ["prefer.loss=kto", "distributed={zero: 2}"],
    "kto zero3": ["prefer.loss=kto", "distributed={zero: 3}"],
    "kto fsdp2": ["prefer.loss=kto", f"distributed={FSDP}"],
    "orpo zero2": ["prefer.loss=orpo", "distributed={zero: 2}"],
    "start zero3": ["prefer.start={folder}/first", "distributed={zero: 3}"],
    "start fsdp2": ["prefer.start={folder}/first", "prefer.reference=backbone", f"distributed={FSDP}"],
}
"""Settings of runs, each of which has rows of its own, so that no other one's reference has read them."""


def pair(n: int) -> dict[str, Any]:
    chosen, rejected = f"It is {n + 1}." + " Yes." * (n % 4), "No idea." + " Who knows?" * (n % 5)
    return {"prompt": f"What comes after {n}?", "chosen": f" {chosen}", "rejected": f" {rejected}"}


def words(folder: Path, name: str) -> list[str]:
    number = list(JOBS).index(name)
    return [f"seed={number}", *(each.replace("{folder}", str(folder)) for each in JOBS[name])]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, short_stories: str) -> Path:
    """The runs of two processes that are asked for, in folders of their names."""
    folder = tmp_path_factory.mktemp("layouts")
    (folder / "rows.jsonl").write_text("".join(json.dumps(pair(n)) + "\n" for n in range(30)))
    recipe = {
        "recipe": "prefer",
        "model": {"id": short_stories, "weights": "float32", "compute": "float32"},
        "adapter": {"method": "lora", "rank": 4, "alpha": 8},
        "data": {"train": str(folder / "rows.jsonl"), "held_out": 0.2},
        "batch": {"size": 5, "tokens_per_device": 160},
        "train": {"steps": 4, "learning_rate": 2e-3},
        "evaluate": {"every": 2, "answers": 0},
        "save": {"every": None},
    }
    (folder / "recipe.yaml").write_text(dump_yaml(recipe))
    workbench.run(str(folder / "recipe.yaml"), ["seed=99"], out=folder / "first", quiet=True)
    names = [cell["name"] for cell in cells(request, "test_two_processes_have_the_losses_of_one")]
    layouts.in_processes(folder, [(name, words(folder, name), None) for name in names])
    return folder


def lines(run: Path, name: str) -> list[float]:
    told = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in told if line.get(name) is not None]


@pytest.mark.nightly(but=["dpo ddp", "kto fsdp2", "orpo zero2", "start zero3"])
@pytest.mark.parametrize("name", JOBS)
def test_two_processes_have_the_losses_of_one(
    runs: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))  # a reference of its own
    alone = tmp_path / "alone"
    own = [word for word in words(runs, name) if not word.startswith("distributed")]
    workbench.run(str(runs / "recipe.yaml"), own, out=alone, quiet=True)
    found = lines(runs / name, "loss")
    assert found == pytest.approx(lines(alone, "loss"), rel=1e-5, abs=1e-5) and found[-1] != found[0]
    assert lines(runs / name, "held_out_loss") == pytest.approx(lines(alone, "held_out_loss"), abs=1e-5)
    scores, wanted = (json.loads((run / "scores.json").read_text()) for run in (runs / name, alone))
    for when in ("before", "after"):
        assert scores[when] == {each: pytest.approx(value, abs=1e-4) for each, value in wanted[when].items()}
    if name.startswith("dpo"):
        assert found[0] == pytest.approx(math.log(2), abs=1e-5)
