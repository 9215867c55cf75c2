"""Folds and members of sweeps over a backbone that two processes share: each member's curve is that of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

import workbench
from tests.conftest import Records, cells, record_cell
from tests.recipes.weather import weather, write
from tests.workbench.training.distributed import layouts
from workbench.config.yaml_text import dump_yaml

pytestmark = pytest.mark.slow

STEPS = 4
FOLDS = ["folds.k=2", "recipe=crossval", "data.test={}/test.jsonl"]
SWEEP = ["recipe=sweep", "of=classify", "sweep={over: {adapter.rank: [2, 4]}}", "data.held_out=0.2"]
SHARED = "distributed={engine: fsdp2, zero: %d}"
ALONE = {
    "folds": FOLDS,
    "packed": [*FOLDS, "model.weights=nf4"],
    "members": SWEEP,
}
TWO = {
    "folds shared": ("folds", [SHARED % 3], None),
    "folds until backward": ("folds", [SHARED % 2, "train.checkpointing=true"], None),
    "folds again": ("folds", [SHARED % 3], "folds shared"),
    "packed shared": ("packed", [SHARED % 3], None),
    "members shared": ("members", [SHARED % 3], None),
    "folds in turn": ("folds", ["distributed.zero=3"], None),
}
"""Runs of two processes: what they repeat, how, and what they go on with."""


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, short_stories: str) -> Path:
    """The runs of one process and of two that are asked for, in folders of their names."""
    folder = tmp_path_factory.mktemp("banks")
    write(folder / "train.jsonl", weather(45, seed=0))
    write(folder / "test.jsonl", weather(7, seed=1))
    recipe = {
        "recipe": "crossval",
        "model": {"id": short_stories, "weights": "float32", "compute": "float32"},
        "adapter": {"method": "lora", "rank": 4, "alpha": 8, "dropout": 0.1},
        "data": {"train": str(folder / "train.jsonl")},
        "batch": {"size": 5, "tokens_per_device": 160},
        "train": {"steps": STEPS, "learning_rate": 5e-3},
        "evaluate": {"every": STEPS // 2, "probe": 0},
        "save": {"every": STEPS // 2, "keep": 2},
    }
    (folder / "recipe.yaml").write_text(dump_yaml(recipe))
    words = {name: [word.replace("{}", str(folder)) for word in own] for name, own in ALONE.items()}
    for name, own in words.items():
        workbench.run(str(folder / "recipe.yaml"), own, out=folder / name, quiet=True)
    asked = {cell["name"] for cell in cells(request, "test_every_member_is_that_of_one_process")}
    asked |= {"folds shared", "folds again"}
    jobs = [(name, [*words[like], *more], origin) for name, (like, more, origin) in TWO.items() if name in asked]
    layouts.in_processes(folder, jobs)
    return folder


def curves(run: Path) -> dict[str, list[tuple[float, ...]]]:
    """Losses of each member, of its steps and of its held-out rows."""
    return {
        str(file.parent.relative_to(run)): [
            (line["loss"], *([line["held_out_loss"]] if "held_out_loss" in line else []))
            for line in map(json.loads, file.read_text().splitlines())
        ]
        for file in sorted(run.glob("members/**/metrics.jsonl"))
    }


def require_same(found: dict[str, list[tuple[float, ...]]], wanted: dict[str, list[tuple[float, ...]]]) -> None:
    assert found.keys() == wanted.keys()
    for member, steps in wanted.items():
        assert len(steps) == STEPS and {len(each) for each in steps} == {1, 2}
        for step, other in zip(steps, found[member], strict=True):
            assert other == pytest.approx(step, rel=1e-5)


def weights(run: Path) -> dict[str, torch.Tensor]:
    """The values of each adapter in a run directory."""
    found = {}
    for file in sorted(run.rglob("adapter/adapter_model.safetensors")):
        saved = load_file(file)
        found[str(file.relative_to(run))] = torch.cat([saved[name].double().flatten() for name in sorted(saved)])
    return found


def predictions(run: Path) -> torch.Tensor:
    """Out-of-fold probabilities, or those of the held-out rows."""
    out_of_fold = run / "out_of_fold.parquet"
    file = out_of_fold if out_of_fold.exists() else run / "predictions.parquet"
    table = pd.read_parquet(file)
    return torch.tensor(table[[name for name in table if name.startswith("p_")]].to_numpy())


@pytest.mark.nightly(but=["folds shared"])
@pytest.mark.parametrize("name", TWO)
def test_every_member_is_that_of_one_process(runs: Path, name: str, record_property: Records) -> None:
    like, (layout, *_), _ = TWO[name]
    record_cell(record_property, method="lora", recipe="sweep" if like == "members" else "crossval", layout=layout)
    found, wanted = curves(runs / name), curves(runs / like)
    assert len(found) == 2
    require_same(found, wanted)
    tensors, others = weights(runs / like), weights(runs / name)
    assert others.keys() == tensors.keys()
    for file, values in tensors.items():
        assert float((others[file] - values).norm() / values.norm()) < 1e-4
    if like == "members":
        summed = [json.loads((runs / each / "sweep.json").read_text())["over_seeds"] for each in (like, name)]
        for one, other in zip(*summed, strict=True):
            assert one["scores"]["after"]["loss"]["mean"] == pytest.approx(
                other["scores"]["after"]["loss"]["mean"], rel=1e-5
            )
    assert predictions(runs / name) == pytest.approx(predictions(runs / like), abs=1e-5)
    if name == "folds in turn":
        assert "One after another" in (runs / name / "log.txt").read_text()


def test_what_was_killed_goes_on_bit_for_bit(runs: Path) -> None:
    assert curves(runs / "folds again") == curves(runs / "folds shared")
    tensors, others = weights(runs / "folds shared"), weights(runs / "folds again")
    assert tensors.keys() == others.keys() and all(torch.equal(others[file], tensors[file]) for file in tensors)


def test_one_process_goes_on_with_what_two_began(runs: Path) -> None:
    layouts.halfway(runs / "folds shared", runs / "folds alone again")
    words = [word.replace("{}", str(runs)) for word in FOLDS]
    workbench.run(str(runs / "recipe.yaml"), words, out=runs / "folds alone again", resume=True, quiet=True)
    require_same(curves(runs / "folds alone again"), curves(runs / "folds"))


def test_they_are_no_runs_of_the_same(runs: Path) -> None:
    assert curves(runs / "packed") != curves(runs / "folds")
