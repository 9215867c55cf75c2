"""Bytes that a plan says, against those that torch's allocator gave."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import workbench
from tests.gpu.conftest import records
from tests.gpu.devices import FEW, HERE, REHEARSAL, needs, needs_device
from workbench.recipes.load import load
from workbench.recipes.verbs.plans.plan import plan

pytestmark = needs_device

SHORT = ["train.steps=4", "train.epochs=null", "evaluate={every: null, answers: 0}", "save.every=null"]
SMALL = ["data.limit=100", "batch.tokens_per_device=2048"]
CASES = {
    "bfloat16": ["model.weights=bfloat16"],
    "nf4": ["model.weights=nf4"],
    "checkpointing": ["model.weights=bfloat16", "train.checkpointing=true"],
    "full": ["model.weights=bfloat16", "model.compute=bfloat16", "adapter={method: full}"],
}
FURTHEST = 0.10
"""Largest share by which a plan of a run this small may be wrong: the allocator rounds."""


@pytest.mark.parametrize("name", CASES)
def test_a_plan_is_what_the_run_holds(name: str, tmp_path: Path, short_stories: str) -> None:
    if FEW and name != "bfloat16":
        pytest.skip("a rehearsal plans one run")
    if name == "nf4":
        needs("bitsandbytes")
    words = [*CASES[name], *SHORT, *SMALL, *([f"model.id={short_stories}", "data.held_out=0.1"] if REHEARSAL else [])]
    planned = plan(load("sft/quickstart", words))
    needed = planned.dry_run.peak + planned.process
    if HERE:
        torch._C._cuda_clearCublasWorkspaces()  # what an earlier run left, and what a run takes anew
        torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated() if HERE else 0
    run = workbench.run("sft/quickstart", words, out=tmp_path / "run", quiet=True)
    held = max(record["peak_bytes"] for record in records(run)) - before
    assert needed > 0 and held > 0
    if not HERE:
        pytest.skip("on an accelerator alone: a CPU tells its process's memory, and no bytes of tensors")
    assert needed == pytest.approx(held, rel=FURTHEST)
