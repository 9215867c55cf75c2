"""LoRA+: B learns faster than A, by the ratio and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import workbench
from workbench.adapters import LoraPlus

RECIPE = """
recipe: sft
model: {{id: {model}, weights: float32, new_tokens: ["<|start|>"]}}
adapter: {{method: lora, rank: 4, alpha: 8}}
data: {{train: {train}, held_out: 0.1}}
batch: {{size: 8}}
train: {{steps: 1, learning_rate: 1.0e-3}}
evaluate: {{every: null, answers: 0}}
"""


def test_the_first_step_moves_b_by_the_ratio_further_and_the_rest_as_far(
    tmp_path: Path, short_stories: str, questions: Path
) -> None:
    """From the same start with the same gradients, Adam's first step is the learning rate for every number."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(model=short_stories, train=questions))
    plain = workbench.run(recipe, out=tmp_path / "plain", quiet=True)
    plus = workbench.run(recipe, ["adapter.method=lora+", "adapter.rate_ratio=5"], out=tmp_path / "plus", quiet=True)
    slow, fast = (load_file(run / "adapter" / "adapter_model.safetensors") for run in (plain, plus))
    assert any("lora_B" in name for name in slow) and any("token" in name for name in slow)
    for name, each in slow.items():
        assert each.any()
        torch.testing.assert_close(fast[name], 5 * each if "lora_B" in name else each)


def test_only_b_learns_faster() -> None:
    method = LoraPlus(rate_ratio=8)
    factors = {part: method.rate_factor(f"model.q_proj.{part}.default.weight") for part in ("lora_A", "lora_B")}
    assert factors == {"lora_A": 1, "lora_B": 8}
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        LoraPlus(rate_ratio=0.5)
