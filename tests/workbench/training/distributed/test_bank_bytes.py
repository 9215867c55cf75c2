"""What each of two processes holds in a step of a bank over their shares of its backbone, against the plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import cells
from tests.workbench.training.distributed import layouts
from workbench.config.yaml_text import dump_yaml
from workbench.recipes.load import load
from workbench.recipes.verbs.plans.plan import plan

pytestmark = pytest.mark.nightly

SHARED = "distributed={engine: fsdp2, zero: %d}"
BF16 = ["model.weights=bfloat16", "model.compute=bfloat16"]
SWEEP = ["recipe=sweep", "of=sft", "sweep={over: {seed: [0, 1]}}"]
FLEET = ["recipe=fleet", "fleet={members: {ada: {data.train: {rows}}, bob: {data.train: {rows}, adapter.rank: 8}}}"]
CASES: dict[str, list[str]] = {
    "fsdp2": [SHARED % 3, *SWEEP],
    "fsdp2, recomputed": [SHARED % 3, *SWEEP, "train.checkpointing=true"],
    "fsdp2, kept whole": [SHARED % 2, *SWEEP],
    "fsdp2, bfloat16": [SHARED % 3, *SWEEP, *BF16],
    "fsdp2, fleet": [SHARED % 3, *FLEET],
}
ALL = [(case, 2) for case in CASES]


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of as many processes, in a folder of their number, with the bytes of each."""
    asked = [
        (cell["case"], cell["devices"]) for cell in cells(request, "test_the_fuller_process_holds_what_was_planned")
    ]
    folder = tmp_path_factory.mktemp("held")
    # Rows of one length, and 16 to train on: each step is as full as every other one.
    prompt = "? the old king went to the small river and saw a red bird in the tree" * 5
    rows = [{"question": f"{1000 + n}{prompt}", "answer": f"It is {1000 + n} and so it is"} for n in range(18)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "model": {"id": "starter", "weights": "float32", "compute": "float32"},
        "data": {"train": str(folder / "rows.jsonl"), "held_out": 0.1, "max_tokens": 256},
        "adapter": {"method": "lora", "rank": 16, "targets": "attention"},
        "batch": {"size": 4, "tokens_per_device": 256},
        "train": {"steps": 6, "learning_rate": 1e-3},
        "evaluate": {"every": 6, "answers": 0},
        "save": {"every": None},
    }
    for devices in {devices for _, devices in asked}:
        own = folder / str(devices)
        own.mkdir()
        (own / "recipe.yaml").write_text(dump_yaml(recipe))
        jobs = [(case, words(folder, case), None) for case, count in asked if count == devices]
        layouts.in_processes(own, jobs, "steps", processes=devices)
    return folder


def words(folder: Path, case: str) -> list[str]:
    return [word.replace("{rows}", str(folder / "rows.jsonl")) for word in CASES[case]]


@pytest.mark.parametrize(("case", "devices"), ALL)
def test_the_fuller_process_holds_what_was_planned(folder: Path, case: str, devices: int) -> None:
    own = folder / str(devices)
    planned = plan(load(str(own / "recipe.yaml"), words(folder, case)), devices=devices)
    measured = max(json.loads((own / f"{case}.{rank}.json").read_text()) for rank in range(devices))
    assert planned.host == 0 and planned.peak == pytest.approx(measured, rel=0.03)
