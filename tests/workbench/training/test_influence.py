"""Influence of rows: directions are those of AdamW's steps, and what is promised of them comes true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cosine_similarity

import workbench
from workbench.training import checkpoints, influence
from workbench.training.influence import AdamMoments

RECIPE = """
recipe: sft
model: {{id: {model}, weights: float32}}
adapter: {{method: lora, rank: 4, alpha: 8, dropout: 0.1}}
data:
  train: {train}
  held_out: 0.1
  limit: 60
  select: {{by: gradient, rows: 20, target: {target}, warm_up: 0.3}}
batch: {{size: 4}}
train: {{steps: 2, learning_rate: 0.01}}
evaluate: {{every: null, answers: 0}}
"""


def test_the_direction_is_that_of_the_next_step_of_adamw() -> None:
    torch.manual_seed(0)
    value = torch.nn.Parameter(torch.randn(50, dtype=torch.float64))
    optimizer = torch.optim.AdamW([value], lr=1e-3, betas=(0.8, 0.95), eps=1e-14, weight_decay=0.0)
    for _ in range(5):
        value.grad = torch.randn_like(value)
        optimizer.step()
    state, before = optimizer.state[value], value.detach().clone()
    moments = AdamMoments(state["exp_avg"].clone(), state["exp_avg_sq"].clone(), (0.8, 0.95), 1e-14)
    value.grad = torch.randn_like(value)
    optimizer.step()
    direction = moments.direction(value.grad)
    assert cosine_similarity(before - value.detach(), direction, dim=0).item() == pytest.approx(1, abs=1e-9)


def test_a_step_along_a_row_lowers_the_loss_of_the_target_as_its_influence_says(
    tmp_path: Path, stories: str, questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row's influence against the loss of a single target row before and after a tiny step on that row."""
    target = tmp_path / "target.jsonl"
    target.write_text(questions.read_text(encoding="utf-8").splitlines()[100] + "\n", encoding="utf-8")
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(model=stories, train=questions, target=target))
    checked: list[float] = []
    real = influence.at_checkpoint

    def watched(trainer: Any, checkpoint: Path, **rows: Any) -> Any:
        found = dict(real(trainer, checkpoint, **rows))
        gradient = influence._row_gradient(trainer)
        names, kept = list(trainer.masters.named()), checkpoints.read_tensors(checkpoint, "optimizer")
        moments = AdamMoments(
            *(torch.cat([kept[f"{n}|{k}"].flatten() for n in names]) for k in ("exp_avg", "exp_avg_sq"))
        )
        slope = gradient(rows["target"], 0).norm().item()
        for row in list(found)[:3]:
            direction = moments.direction(gradient(rows["rows"], row))
            ahead, behind = (_loss_at(trainer, rows["target"], direction, size) for size in (2e-3, -2e-3))
            assert (behind - ahead) / 4e-3 / slope == pytest.approx(found[row], abs=0.02)
            checked.append(found[row])
        return iter(found.items())

    monkeypatch.setattr(influence, "at_checkpoint", watched)
    workbench.run(path, out=tmp_path / "run", quiet=True)
    assert len(checked) == 3 * 4 and np.ptp(checked) > 0.02, "four checkpoints, and rows that differ"
    assert not (tmp_path / "run" / "warm_up").exists()


def _loss_at(trainer: Any, rows: Any, direction: torch.Tensor, size: float) -> float:
    """Mean loss of the first row after a step of this length against the direction."""
    masters = list(trainer.masters)
    parts = (size * direction / direction.norm()).split([master.numel() for master in masters])
    with torch.no_grad():
        for sign in (-1, 1):
            for master, part in zip(masters, parts, strict=True):
                master += sign * part.view_as(master)
            trainer.masters.refresh()
            if sign == -1:
                loss = trainer.loss(rows.batch(np.array([0])), 1 / int(rows.supervised[0])).item()
    return float(loss)
