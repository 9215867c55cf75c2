"""Long rows: tiles change rounding alone, and inputs of blocks that wait on the host nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

import workbench
from tests.gpu.conftest import records
from tests.gpu.devices import HERE, gpu_alone, needs_device

pytestmark = needs_device

WORDS = ["data.limit=40", "batch={size: 4, tokens_per_device: 2048}", "train={epochs: null, steps: 4}"]
QUIET = ["evaluate={every: null, answers: 0, samples: 0}", "save.every=null", "model.weights=bfloat16"]
AGAIN = "train.checkpointing=true"


def _run(folder: Path, model: str, *words: str) -> tuple[list[float], int]:
    """Losses, and the most bytes of the allocator."""
    own = [] if HERE else [f"model.id={model}"]
    found = records(workbench.run("sft/quickstart", [*WORDS, *QUIET, AGAIN, *own, *words], out=folder, quiet=True))
    return [each["loss"] for each in found], max(each["peak_bytes"] for each in found)


def test_tiles_change_rounding_alone(tmp_path: Path, short_stories: str) -> None:
    wanted, most = _run(tmp_path / "whole", short_stories, "train.mlp_tile=null")
    found, tiled = _run(tmp_path / "tiles", short_stories, "train.mlp_tile=64")
    assert found == pytest.approx(wanted, rel=2e-2)
    assert not HERE or tiled <= most


@gpu_alone("a CPU has no other memory")
def test_inputs_on_the_host_change_nothing(tmp_path: Path, short_stories: str) -> None:
    wanted, most = _run(tmp_path / "here", short_stories, "train.offload_activations=false")
    found, waiting = _run(tmp_path / "host", short_stories, "train.offload_activations=true")
    assert found == pytest.approx(wanted, rel=1e-5)
    assert waiting < most
