"""Savings for long rows change nothing where processes share all weights: weights are back in time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import workbench
from tests.conftest import cells
from tests.workbench.training.distributed import layouts
from tests.workbench.training.distributed.test_layouts import METHODS, require_same, write_recipe

pytestmark = pytest.mark.slow

TILE = "train.mlp_tile=16"
AWAY = ("train.checkpointing=true", "train.offload_activations=true")
FSDP2 = {zero: f"distributed={{engine: fsdp2, zero: {zero}}}" for zero in (2, 3)}
SAVINGS = {
    "elementwise": ("lora", "train.checkpointing=elementwise", FSDP2[3]),
    "half": ("full", "train.checkpointing=0.5", FSDP2[2]),
    "tiles": ("full", TILE, FSDP2[3]),
    "tiles of packed weights": ("nf4", TILE, FSDP2[3]),
    "tiles and inputs away": ("lora", TILE, *AWAY, FSDP2[3]),
    "inputs away": ("full", *AWAY, "distributed.zero=3"),
}
ALONE = {
    "lora": [f"adapter={METHODS['lora']}"],
    "full": [f"adapter={METHODS['full']}"],
    "nf4": [f"adapter={METHODS['lora']}", "model.weights=nf4"],
}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, short_stories: str) -> Path:
    """The runs of two processes that are asked for, and of one without savings, in folders of their names."""
    folder = tmp_path_factory.mktemp("long_rows")
    write_recipe(folder, Path(short_stories))
    asked = [cell["saving"] for cell in cells(request, "test_a_saving_changes_nothing")]
    words = ["train.steps=3", "save.every=null", "batch.tokens_per_device=160"]
    for name in {SAVINGS[saving][0] for saving in asked}:
        workbench.run(str(folder / "recipe.yaml"), [*words, *ALONE[name]], out=folder / name, quiet=True)
    jobs = [(each, [*words, *ALONE[SAVINGS[each][0]], *SAVINGS[each][1:]], None) for each in asked]
    layouts.in_processes(folder, jobs, "away")
    return folder


@pytest.mark.nightly(but=["elementwise", "tiles and inputs away", "inputs away"])
@pytest.mark.parametrize("saving", SAVINGS)
def test_a_saving_changes_nothing(runs: Path, saving: str) -> None:
    name = SAVINGS[saving][0]
    require_same(runs / saving, runs / name)
    copied = [json.loads((runs / f"{saving}.{rank}.json").read_text()) for rank in (0, 1)]
    assert all(copied) if "away" in saving else not any(copied)
