"""The loss of a student that is taught: labels and teacher in their shares, in no more memory than labels alone.

Adapters that teach each other where memory is short.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.conftest import trains
from tests.run_files import read_losses
from tests.workbench.distillation.staged import Student, run
from workbench.config.sections.distill_config import BACKBONE, DistillConfig, TeacherConfig
from workbench.data.batching import Indices, MicroBatch, Row, collate
from workbench.distillation import student_loss, teacher_sources
from workbench.distillation.student_loss import TeacherLogits, distillation_loss, mixed
from workbench.losses.next_token import NO_LABEL
from workbench.models import fused_lora
from workbench.planning.counters import LiveBytes
from workbench.recipes.tasks.sft.text_run import next_token_loss
from workbench.training.signal import Loss
from workbench.training.trainer import Trainer

N, D, V, T = 6, 4, 11, 2.0


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_labels_and_teacher_have_their_shares(alpha: float) -> None:
    """(1 - alpha) CE + alpha T^2 KL, of which a position without a label has the second part alone."""
    logits, hidden, head = _normal(N, V, seed=0).requires_grad_(), _normal(N, D, seed=1), _normal(D, V, seed=2)
    labels = torch.tensor([3, NO_LABEL, 0, 5, 1, NO_LABEL])
    said = TeacherLogits([hidden], [lambda states: states @ head], [V], DistillConfig(loss="forward_kl"), T)
    found = mixed(said, alpha)(logits, labels, hidden)
    p, q = (hidden @ head / T).softmax(-1), (logits / T).softmax(-1)
    taught = T**2 * (p * (p / q).log()).sum()
    wanted = (1 - alpha) * F.nll_loss(logits.softmax(-1).log(), labels, reduction="sum") + alpha * taught
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(torch.autograd.grad(found, logits), torch.autograd.grad(wanted, logits))


@pytest.mark.parametrize("shares", [None, (3.0, 1.0), "confidence"])
def test_several_teachers_count_by_their_shares(shares: Any) -> None:
    config = DistillConfig(teacher=TeacherConfig(id=("a", "b"), shares=shares))
    hidden, heads = [_normal(N, D, seed=1), _normal(N, D, seed=2)], [_normal(D, V, seed=3), 3 * _normal(D, V, seed=4)]
    numbers = shares if isinstance(shares, tuple) else ()
    projects = [lambda states, head=head: states @ head for head in heads]
    found = TeacherLogits(hidden, projects, [V, V], config, T, numbers).log_probs(hidden, vocabulary=V)
    each = [(states @ head / T).softmax(-1) for states, head in zip(hidden, heads, strict=True)]
    for position in range(N):
        weights = list(numbers) or [1.0, 1.0]
        if shares == "confidence":
            weights = [float((p[position] * p[position].log()).sum().exp()) for p in each]
        wanted = sum(w * p[position] for w, p in zip(weights, each, strict=True)) / sum(weights)
        torch.testing.assert_close(found[position].exp(), wanted)


def test_schedules_go_from_one_number_to_the_other() -> None:
    linear, cosine = (DistillConfig(alpha=(0.9, 0.1), temperature=3.0, schedule=name) for name in ("linear", "cosine"))
    assert [linear.alpha_at(done) for done in (0, 0.25, 1)] == pytest.approx([0.9, 0.7, 0.1])
    assert [cosine.alpha_at(done) for done in (0, 0.5, 1)] == pytest.approx([0.9, 0.5, 0.1])
    assert cosine.alpha_at(0.25) == pytest.approx(0.9 - 0.8 * (1 - 0.5**0.5) / 2)
    assert linear.temperature_at(0.3) == cosine.temperature_at(0.3) == 3.0


def _rows() -> MicroBatch:
    """Text of 64 tokens a row, four fifths of them supervised."""
    chance = np.random.default_rng(0)
    return collate([Row(chance.integers(3, 500, 64), np.arange(64) % 5 != 1) for _ in range(6)])


def _peak(student: Student, loss: Loss, batch: MicroBatch) -> int:
    student.model.train()
    with LiveBytes() as live:
        loss(batch, 1 / len(batch.labels_N)).backward()
    for parameter in student.trained().values():
        parameter.grad = None
    return live.peak


@pytest.mark.nightly(but="each value once")
@pytest.mark.parametrize("factor", ["ARRAYS", "CPU_ARRAYS"])
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
def test_a_teacher_on_the_same_backbone_takes_no_more_memory_than_labels_alone(
    factor: str, divergence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 3 %: its own pass is over when the student keeps activations. Labels take all positions as one chunk."""
    student, batch = Student(run("lora", rank=4)), _rows()
    teacher = student.taught_by(teacher_sources.find(TeacherConfig(id=BACKBONE), student.config.model))
    assert teacher.shared
    fused_lora.fuse(student.model)
    chunk = student.head.vocabulary * len(batch.labels_N)
    monkeypatch.setattr(sys.modules["workbench.losses.chunked_loss"], "CHUNK_ELEMENTS", chunk)
    monkeypatch.setattr(student_loss, "CPU_ARRAYS", getattr(student_loss, factor))
    config = DistillConfig.model_validate({"loss": divergence, "alpha": 0.8})
    alone = _peak(student, next_token_loss(student.model, student.head), batch)
    taught = _peak(student, distillation_loss(config, student.model, student.head, teacher, None, lambda: 0.0), batch)
    assert taught <= 1.03 * alone


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
