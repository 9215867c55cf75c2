"""Influence of rows: directions are those of AdamW's steps, and what is promised of them comes true."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.nn.functional import cosine_similarity

import workbench
from tests.conftest import write_animals
from workbench.data.selection import in_turns
from workbench.training import checkpoints, influence
from workbench.training.influence import AdamMoments, Projection

RECIPE = """
recipe: sft
model: {{id: {model}, weights: float32}}
adapter: {{method: lora, rank: 4, alpha: 8, dropout: 0.1}}
data:
  train: {train}
  held_out: 0.1
  limit: 40
  select: {{by: gradient, rows: 12, target: {target}, warm_up: 0.3}}
batch: {{size: 4}}
train: {{steps: 2, learning_rate: 0.01}}
evaluate: {{every: null, answers: 0}}
"""


LABELS = """
recipe: classify
model: {{id: {model}, weights: float32}}
adapter: {{method: lora, rank: 4, alpha: 8}}
data:
  train: {train}
  held_out: 0.2
  select: {{by: gradient, rows: 12, target: {target}, warm_up: 0.4}}
batch: {{size: 4}}
train: {{steps: 1, learning_rate: 0.01}}
evaluate: {{every: null, probe: 0}}
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
    tmp_path: Path, short_stories: str, questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row's influence against the loss of a single target row before and after a tiny step on that row."""
    target = tmp_path / "target.jsonl"
    target.write_text(questions.read_text(encoding="utf-8").splitlines()[100] + "\n", encoding="utf-8")
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(model=short_stories, train=questions, target=target))
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
            assert (behind - ahead) / 4e-3 / slope == pytest.approx(found[row][0], abs=0.02)
            checked.extend(found[row])
        return iter(found.items())

    monkeypatch.setattr(influence, "at_checkpoint", watched)
    workbench.run(path, out=tmp_path / "run", quiet=True)
    assert len(checked) == 3 * 4 and np.ptp(checked) > 0.02, "four checkpoints, and rows that differ"
    assert not (tmp_path / "run" / "warm_up").exists()


def test_a_projection_keeps_inner_products_in_expectation() -> None:
    """Exact over all ways to sum three values into two; the spread is that of a count sketch; few values stay."""
    left, right = torch.tensor([0.6, -0.8, 0.3]), torch.tensor([0.2, 0.5, -1.0])
    project = Projection(3, 2, seed=0, device=left.device)
    found = []
    for sums in itertools.product((0, 1), repeat=3):
        for signs in itertools.product((-1, 1), repeat=3):
            project._sum_P, project._sign_P = torch.tensor(sums), torch.tensor(signs)
            found.append((project(left) @ project(right)).item())
    assert np.mean(found) == pytest.approx((left @ right).item(), abs=1e-6) and np.ptp(found) > 1
    torch.manual_seed(0)
    vector = torch.nn.functional.normalize(torch.randn(20_000), dim=0)
    far = [
        float(each @ each) - 1
        for each in (Projection(20_000, 512, seed=n, device=vector.device)(vector) for n in range(40))
    ]
    assert np.std(far) == pytest.approx((2 / 512) ** 0.5, rel=0.35)
    assert Projection(20_000, 20_000, seed=0, device=vector.device)(vector) is vector


@pytest.mark.slow
def test_rows_of_labels_are_chosen_by_the_equation_for_each_class_of_the_target(
    tmp_path: Path, short_stories: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written out: autograd from logits, Adam's direction, cosines, their mean over the warm-up, rows in turns."""
    path, warm_up = tmp_path / "recipe.yaml", tmp_path / "run" / "warm_up"
    train, target = (tmp_path / f"{name}.jsonl" for name in ("train", "target"))
    write_animals(train, range(30))
    write_animals(target, range(40, 47))
    path.write_text(LABELS.format(model=short_stories, train=train, target=target))
    total_NG, rates = 0.0, list[float]()
    real = influence.at_checkpoint

    def watched(trainer: Any, checkpoint: Path, *, rows: Any, target: Any, **rest: Any) -> Any:
        nonlocal total_NG
        found = dict(real(trainer, checkpoint, rows=rows, target=target, **rest))
        cosine_NG = _cosines(trainer, checkpoint, rows, target)
        np.testing.assert_allclose([found[row] for row in range(len(rows))], cosine_NG, atol=1e-5)
        lines = (warm_up / "metrics.jsonl").read_text().splitlines()
        steps = len(lines) // 4
        rate = np.mean(
            [json.loads(line)["learning_rate"] for line in lines[steps * len(rates) : steps * (len(rates) + 1)]]
        )
        rates.append(float(rate))
        total_NG = total_NG + rates[-1] * cosine_NG
        return iter(found.items())

    monkeypatch.setattr(influence, "at_checkpoint", watched)
    table = pd.read_parquet(workbench.run(path, out=tmp_path / "run", quiet=True) / "selection.parquet")
    score_NG = np.asarray(total_NG) / sum(rates)
    assert len(rates) == 4 and np.ptp(rates) > 0 and score_NG.shape == (24, 3)
    np.testing.assert_allclose(table["score"], score_NG.max(1), atol=1e-5)
    assert np.flatnonzero(table["kept"]).tolist() == sorted(in_turns(score_NG)[:12].tolist())


def _cosines(trainer: Any, checkpoint: Path, rows: Any, target: Any) -> np.ndarray[Any, Any]:
    """Cosine of each row's direction with the gradients of each class of the target, a mean over its rows."""
    named = {name: each for name, each in trainer.model.named_parameters() if each.requires_grad}
    kept = checkpoints.read_tensors(checkpoint, "optimizer")
    first, second = (
        np.concatenate([kept[f"{name}|{kind}"].numpy().ravel() for name in named]) for kind in ("exp_avg", "exp_avg_sq")
    )

    def gradient(data: Any, row: int) -> np.ndarray[Any, Any]:
        batch = data.batch(np.array([row]))
        logits = trainer.model(**batch.inputs).logits
        label = torch.tensor([int(data.targets_NC[row].argmax())])
        parts = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, label), list(named.values()))
        return np.concatenate([part.numpy().ravel() for part in parts])

    def unit(vector: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return vector / np.linalg.norm(vector)

    def direction(slope: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return unit((0.9 * first + 0.1 * slope) / np.sqrt(0.999 * second + 0.001 * slope**2 + 1e-8))

    label_T = target.targets_NC.argmax(1)
    aims = [np.mean([unit(gradient(target, row)) for row in np.flatnonzero(label_T == each)], 0) for each in range(3)]
    return np.array([[direction(gradient(rows, row)) @ aim for aim in aims] for row in range(len(rows))])


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
