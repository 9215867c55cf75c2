"""Long rows: tiles change rounding alone, and inputs of blocks that wait on the host nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

import workbench
from tests.conftest import tiny
from tests.gpu.conftest import records
from tests.gpu.devices import HERE, gpu_alone, needs_device
from workbench.data import starter

pytestmark = needs_device

WORDS = ["data.limit=40", "train={epochs: null, steps: 4}"]
MANY, FEW = "batch={size: 32, tokens_per_device: 16384}", "batch={size: 4, tokens_per_device: 2048}"
"""As many tokens as make inputs of blocks large beside all else, and what a CPU computes."""
QUIET = ["evaluate={every: null, answers: 0, samples: 0}", "save.every=null", "model.weights=bfloat16"]
AGAIN = "train.checkpointing=true"


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory, short_stories: str) -> str:
    """On an accelerator a Llama of many blocks with wide MLPs; on a CPU a small one."""
    if not HERE:
        return short_stories
    folder, tokenizer = tmp_path_factory.mktemp("deep"), AutoTokenizer.from_pretrained(starter.FOLDER)
    sizes = {"hidden_size": 256, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 4}
    model = tiny("Llama", **sizes, vocab_size=len(tokenizer), max_position_embeddings=1024)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def _run(folder: Path, model: str, *words: str) -> tuple[list[float], int]:
    """Losses, and the most bytes of the allocator."""
    words = (*WORDS, *QUIET, AGAIN, MANY if HERE else FEW, f"model.id={model}", *words)
    found = records(workbench.run("sft/quickstart", words, out=folder, quiet=True))
    return [each["loss"] for each in found], max(each["peak_bytes"] for each in found)


def test_tiles_change_rounding_alone(tmp_path: Path, deep: str) -> None:
    wanted, most = _run(tmp_path / "whole", deep, "train.mlp_tile=null")
    found, tiled = _run(tmp_path / "tiles", deep, "train.mlp_tile=64")
    assert found == pytest.approx(wanted, rel=2e-2)
    assert not HERE or tiled < most


@gpu_alone("a CPU has no other memory")
def test_inputs_on_the_host_change_nothing(tmp_path: Path, deep: str) -> None:
    wanted, most = _run(tmp_path / "here", deep, "train.offload_activations=false")
    found, waiting = _run(tmp_path / "host", deep, "train.offload_activations=true")
    assert found == pytest.approx(wanted, rel=1e-5)
    assert waiting < most
