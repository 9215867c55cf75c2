"""ZeRO and FSDP2 on one rank, whose messages NCCL carries, against a run that nothing is cut of."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import write_questions
from tests.gpu.conftest import RECIPE, losses
from tests.gpu.devices import FEW, needs, needs_device
from tests.workbench.training.distributed import layouts

pytestmark = needs_device

LAYOUTS = {
    "fsdp2_2": "{engine: fsdp2, zero: 2}",
    "fsdp2_3": "{engine: fsdp2, zero: 3}",
    "fsdp2_3_cpu": "{engine: fsdp2, zero: 3, offload_optimizer: cpu, offload_parameters: cpu}",
    "zero1": "{zero: 1}",
    "zero2": "{zero: 2}",
    "zero2_cpu": "{zero: 2, offload_optimizer: cpu}",
    "zero3": "{zero: 3}",
    "zero3_cpu": "{zero: 3, offload_optimizer: cpu, offload_parameters: cpu}",
}
"""FSDP2 first: DeepSpeed's stage 3 replaces torch's linear function for the rest of a process."""
WITHOUT = ["distributed={zero: 0}"]
if FEW:
    LAYOUTS = {name: LAYOUTS[name] for name in ("fsdp2_3", "zero2_cpu")}
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, short_stories: str) -> Path:
    """Runs of all layouts by their names, and `alone`; each in a process of its own but for those of FSDP2."""
    folder = tmp_path_factory.mktemp("layouts")
    questions = write_questions(folder / "questions.jsonl", [f"{n + 1}" + " it is" * (n % 7) for n in range(120)])
    (folder / "recipe.yaml").write_text(RECIPE.format(model=short_stories, train=questions))
    jobs = [("alone", WITHOUT, None)]
    jobs += [
        (name, [f"distributed={layout}"], None)
        for name, layout in LAYOUTS.items()
        if HAS_DEEPSPEED or name.startswith("fsdp2")
    ]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, layouts.__file__, str(folder), str(folder / "jobs.json")]
    # Behind the rest: the checkout's own `workbench` has no adapters and recipes.
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(Path(__file__).parents[2])])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    (folder / "told").write_text(done.stderr[-5000:])
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_changes_nothing(layout: str, runs: Path) -> None:
    if layout.startswith("zero"):
        needs("deepspeed")
    path = runs / layout / "metrics.jsonl"
    assert path.exists(), (runs / "told").read_text()
    found, wanted = losses(runs / layout), losses(runs / "alone")
    assert len(found) == 6 and found == pytest.approx(wanted, rel=1e-4)
    assert json.loads((runs / layout / "manifest.json").read_text())["status"] == "done"
