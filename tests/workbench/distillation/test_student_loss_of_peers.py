"""Adapters that teach each other where memory is short."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import trains
from tests.run_files import read_losses
from workbench.data.batching import Indices
from workbench.training.trainer import Trainer

RECIPE = """
recipe: distill
model: {{id: {model}, weights: float32}}
adapter: {{method: lora, rank: 4}}
distill: {{peers: 2}}
data: {{train: {train}, held_out: 0.1}}
batch: {{size: 8}}
train: {{steps: 2, learning_rate: 5.0e-3}}
evaluate: {{every: null, answers: 0}}
save: {{every: null}}
"""


@pytest.mark.slow
def test_where_memory_runs_out_they_take_smaller_micro_batches_and_recompute_nothing(
    tmp_path: Path, short_stories: str, questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = trains(tmp_path, RECIPE, model=short_stories, train=questions)

    def losses(name: str) -> list[float]:
        return read_losses(train(name=name))

    kept, gradients, tried = losses("kept"), Trainer.gradients, list[tuple[object, int]]()

    def short(self: Trainer, rows: Indices, *, step: int) -> tuple[Tensor, Any]:
        tried.append((self.keeping.now, self.tokens))
        if self.tokens > self._longest:
            raise torch.OutOfMemoryError("fake")
        return gradients(self, rows, step=step)

    monkeypatch.setattr(Trainer, "gradients", short)
    assert losses("short") == pytest.approx(kept, rel=1e-5)
    assert tried[0][1] > tried[-1][1] and {now for now, _ in tried} == {False}
