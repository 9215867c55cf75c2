"""What each of two processes reads and holds while a backbone is loaded, scored and cut: a share, and few blocks whole.

One of them reads the file, and sends the other what it holds.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from tests.conftest import cells
from tests.workbench.training.distributed import layouts
from workbench.config.yaml_text import dump_yaml

pytestmark = pytest.mark.slow

WIDTH, BLOCKS = 384, 12
BLOCK = 4 * WIDTH**2 + 3 * WIDTH * 2 * WIDTH
"""Weights of one block."""
CASES = {
    "zero3": ("{zero: 3}", "bfloat16", 2.0),
    "fsdp2": ("{engine: fsdp2, zero: 3}", "nf4", 4.127 / 8),
    "tensor": ("{tensor: 2}", "bfloat16", 2.0),
}
"""Layouts, and bytes of a weight."""
WHOLE = 4
"""Blocks: one that computes, and the next on its way, in the pieces that came and put together."""


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, stories: str) -> Path:
    """Runs of two processes that are asked for, beside them the bytes of each before the first step."""
    folder = tmp_path_factory.mktemp("loading")
    tokenizer = AutoTokenizer.from_pretrained(stories)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": BLOCKS}
    config = LlamaConfig(vocab_size=len(tokenizer), num_attention_heads=6, **sizes)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [{"question": f"How many is {n} and one?", "answer": str(n + 1)} for n in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "recipe": "sft",
        "model": {"id": str(folder / "model"), "compute": "bfloat16"},
        "data": {"train": str(folder / "rows.jsonl"), "held_out": 0.1},
        "adapter": {"method": "lora", "rank": 2, "alpha": 4},
        "batch": {"size": 2, "tokens_per_device": 64},
        "train": {"steps": 1, "learning_rate": 1e-3},
        "evaluate": {"every": None, "answers": 1, "max_new_tokens": 2},
        "save": {"every": None},
    }
    (folder / "recipe.yaml").write_text(dump_yaml(recipe))
    asked = {cell["case"] for cell in cells(request, "test_a_process_holds_its_share_and_few_blocks")}
    jobs = [
        (name, [f"distributed={layout}", f"model.weights={weights}"], None)
        for name, (layout, weights, _) in CASES.items()
        if name in asked
    ]
    layouts.in_processes(folder, jobs, "start")
    return folder


@pytest.mark.nightly(but=["zero3", "fsdp2"])
@pytest.mark.parametrize("case", CASES)
def test_a_process_holds_its_share_and_few_blocks(folder: Path, case: str) -> None:
    each = CASES[case][2]
    first, second = (json.loads((folder / f"{case}.{rank}.json").read_text()) for rank in (0, 1))
    held = max(first["held"], second["held"])
    share, block, unpacked = each * BLOCKS * BLOCK / 2, each * BLOCK, 2 * BLOCK
    assert share < held < share + WHOLE * block + (unpacked if case == "fsdp2" else 0)
    assert first["read"] >= 2 * BLOCKS * BLOCK and second["read"] == 0, (first, second)
