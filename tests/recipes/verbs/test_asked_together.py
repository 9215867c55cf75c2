"""Two processes that train together evaluate at the same step when one of them is asked, and learn what they would."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.recipes.verbs import asked_together
from tests.run_files import read_metrics

RECIPE = """
recipe: sft
model: {{id: {model}, weights: float32}}
adapter: {{method: lora, rank: 4, alpha: 8}}
data: {{train: {train}, held_out: 0.1}}
batch: {{size: 8}}
train: {{steps: 5, learning_rate: 1.0e-2}}
evaluate: {{every: 4, answers: 3, max_new_tokens: 4}}
save: {{every: null}}
distributed: {layout}
"""


@pytest.mark.nightly(but=["{engine: fsdp2, zero: 3}"])
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["{}", "{engine: fsdp2, zero: 3}"])
def test_both_evaluate_and_go_on(layout: str, tmp_path: Path, short_stories: str, questions: Path) -> None:
    """Where they share weights none of them could answer alone, and there are no sample answers."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(model=short_stories, train=questions, layout=layout))
    usual, asked = _trained(recipe, tmp_path / "usual"), _trained(recipe, tmp_path / "asked", "ask")
    assert [line["loss"] for line in usual] == [line["loss"] for line in asked]
    assert [line["step"] for line in usual if "held_out_loss" in line] == [4, 5]
    assert [line["step"] for line in asked if "held_out_loss" in line] == [3, 4, 5]
    if layout != "{}":
        assert not (tmp_path / "asked" / "samples.jsonl").exists()
        return
    steps = [json.loads(line)["step"] for line in (tmp_path / "asked" / "samples.jsonl").read_text().splitlines()]
    assert steps == [0] * 3 + [3] * 3 + [4] * 3 + [5] * 3


def _trained(recipe: Path, out: Path, *words: str) -> list[dict[str, Any]]:
    command = [forked.python(), "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=localhost:0", str(asked_together.__file__), str(recipe), str(out), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-5000:]
    return read_metrics(out)
