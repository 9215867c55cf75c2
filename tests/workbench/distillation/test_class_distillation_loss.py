"""What a student of classes learns from outputs: the loss written out, and which rows are drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.config import RunConfig
from workbench.config.sections.classes_config import ClassesConfig, Kind
from workbench.config.sections.distill_config import DistillConfig
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.data.labelled.record_table import EncodedTexts, FieldTokens, LabelledRecord
from workbench.data.labelled.text_reader import TokenRows
from workbench.data.rows import RawRow
from workbench.distillation.class_distillation import examples, soft_criterion, with_teacher
from workbench.losses.criterion import Objective, criterion

B, C, SCALE = 6, 3, 1 / 6
CHANCE = torch.Generator().manual_seed(0)
STUDENT, TEACHER = torch.randn(B, C, generator=CHANCE), 2 * torch.randn(B, C, generator=CHANCE)
HOT = F.one_hot(torch.tensor([0, 1, 2, 2, 0, 2]), C).float()
SOME = torch.tensor([[1.0, 1, 0], [0, 0, 0], [1, 0, 1], [0, 1, 0], [1, 1, 1], [0, 0, 1]])
WEIGHTS = torch.tensor([1.0, 0.5, 2.0, 1.0, 0.25, 3.0])
ONES = torch.ones(B)
DIVERGENCES = ["forward_kl", "reverse_kl", "jsd", "skew_forward_kl", "skew_reverse_kl", "total_variation"]


def hard(kind: Kind = "one", targets: Tensor = HOT, **settings: Any) -> Objective:
    return criterion(ClassesConfig.model_validate({"kind": kind, **settings}), targets)


def loss(
    kind: Kind = "one",
    *,
    targets: Tensor = HOT,
    student: Tensor = STUDENT,
    teacher: Tensor = TEACHER,
    weights: Tensor = WEIGHTS,
    labelled: Tensor = ONES,
    progress: float = 0.0,
    **settings: Any,
) -> Tensor:
    config = DistillConfig.model_validate({"teacher": {"id": "x"}, **settings})
    objective = soft_criterion(hard(kind, targets), kind, config, classes=targets.shape[1], progress=lambda: progress)
    return objective(student, torch.cat([weights[:, None], targets, teacher, labelled[:, None]], dim=1), SCALE)


def test_labels_alone_are_the_plain_loss_to_the_last_bit() -> None:
    plain = hard()(STUDENT, torch.cat([WEIGHTS[:, None], HOT], dim=1), SCALE)
    assert torch.equal(loss(alpha=0.0), plain)


@pytest.mark.parametrize("kind", ["one", "pair"])
def test_one_class_is_the_kl_of_softened_distributions_times_the_square(kind: Kind) -> None:
    p, q = (TEACHER / 3).softmax(1), (STUDENT / 3).softmax(1)
    wanted = 9 * ((p * (p / q).log()).sum(1) * WEIGHTS).sum() * SCALE
    torch.testing.assert_close(loss(kind, alpha=1.0, temperature=3.0), wanted)
    plain = hard()(STUDENT, torch.cat([WEIGHTS[:, None], HOT], dim=1), SCALE)
    torch.testing.assert_close(loss(kind, alpha=0.3, temperature=3.0), 0.7 * plain + 0.3 * wanted)


def test_several_classes_are_questions_of_their_own() -> None:
    p, q = (TEACHER / 2).sigmoid(), (STUDENT / 2).sigmoid()
    each = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    wanted = 4 * (each.sum(1) * WEIGHTS).sum() * SCALE
    torch.testing.assert_close(loss("several", targets=SOME, alpha=1.0, temperature=2.0), wanted)


def test_numbers_know_no_temperature() -> None:
    one: dict[str, Any] = {"targets": HOT[:, :1], "student": STUDENT[:, :1], "teacher": TEACHER[:, :1]}
    wanted = ((STUDENT[:, 0] - TEACHER[:, 0]) ** 2 * WEIGHTS).sum() * SCALE
    torch.testing.assert_close(loss("number", **one, alpha=1.0, temperature=5.0), wanted)


@pytest.mark.parametrize("kind", ["one", "several"])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_weight_counts_like_repeated_rows_and_parts_add_up(name: str, kind: Kind) -> None:
    repeats = torch.tensor([0, 1, 1, 2, 2, 2, 3, 4, 5, 5])
    student = STUDENT.clone().requires_grad_()
    whole = loss(kind, student=student, weights=torch.tensor([1.0, 2, 3, 1, 1, 2]), loss=name)
    parts = [
        loss(
            kind,
            student=student[rows],
            teacher=TEACHER[rows],
            targets=HOT[rows],
            weights=torch.ones(len(rows)),
            labelled=torch.ones(len(rows)),
            loss=name,
        )
        for rows in (repeats[:4], repeats[4:])
    ]
    total = torch.stack(parts).sum()
    torch.testing.assert_close(whole, total)
    grads = [torch.autograd.grad(each, student)[0] for each in (whole, total)]
    assert grads[0].abs().sum() > 0
    torch.testing.assert_close(*grads)
    same = loss(kind, teacher=STUDENT, loss=name, alpha=1.0)
    torch.testing.assert_close(same, torch.zeros(()), atol=1e-6, rtol=0)


def test_rows_without_labels_are_taught_by_the_teacher_alone() -> None:
    some = torch.tensor([1.0, 0, 1, 0, 0, 1])
    kept = some.bool()
    apart = loss(alpha=1.0) + loss(alpha=0.0, weights=WEIGHTS * some)
    torch.testing.assert_close(2 * loss(alpha=0.5, labelled=some), apart)
    other = torch.where(kept[:, None], HOT, 1 - HOT)
    assert torch.equal(loss(labelled=some, targets=other), loss(labelled=some)), "their targets are not looked at"


def test_settings_follow_the_run() -> None:
    moving: dict[str, Any] = {"alpha": (1.0, 0.0), "temperature": (4.0, 2.0)}
    assert torch.equal(loss(**moving, progress=0.0), loss(alpha=1.0, temperature=4.0))
    assert torch.equal(loss(**moving, progress=0.5), loss(alpha=0.5, temperature=3.0))
    assert torch.equal(loss(**moving, progress=1.0), loss(alpha=0.0))


def rows(classes: list[int], *, name: str = "rows") -> LabelledSet:
    return LabelledSet(
        records=tuple(LabelledRecord(RawRow(f"{name} {n}"), ("",), None) for n in range(len(classes))),
        inputs=TokenRows(EncodedTexts.of(FieldTokens(np.arange(2, 5 + n % 4), False) for n in range(len(classes)))),
        targets_NC=np.asarray([[float(each == c) for c in range(C)] for each in classes], dtype=np.float32),
        supervised=np.ones(len(classes)),
        source=name,
        fingerprint="",
    )


def config(**classes: Any) -> RunConfig:
    return RunConfig.model_validate({"recipe": "classify", "data": {"train": "x"}, "classes": classes})


NONE = -1


@pytest.mark.parametrize("sampling", ["none", "over", "under"])
def test_further_rows_are_drawn_once_beside_balanced_ones(sampling: str) -> None:
    train, extra = rows([0] * 7 + [1] * 2 + [2] * 4), rows([NONE] * 5, name="extra")
    both = [with_teacher(each, np.zeros((len(each), C)), labelled=True) for each in (train, extra)]
    drawn = examples(config(sampling=sampling), both[0], both[1])
    each = {"none": None, "over": 7, "under": 2}[sampling]
    assert len(drawn) == (13 if each is None else 3 * each) + 5
    for epoch in range(3):
        order = np.random.default_rng(epoch).permutation(len(drawn))
        taken = drawn.sample(order, epoch=epoch)
        assert sorted(taken[taken >= 13]) == [13, 14, 15, 16, 17]
        assert [drawn.place(row) for row in (12, 13)] == ["rows 12", "extra 0"]
        counts = [int(train.targets_NC[taken[taken < 13]][:, c].sum()) for c in range(C)]
        assert counts == ([7, 2, 4] if each is None else [each] * 3)
    assert drawn.lengths[17] == 3 and len(drawn.supervised) == 18


def test_class_weights_leave_further_rows_their_weight() -> None:
    train, extra = rows([0] * 6 + [1] * 2 + [2] * 4), rows([NONE] * 3)
    both = [with_teacher(each, np.zeros((len(each), C)), labelled=True) for each in (train, extra)]
    drawn = examples(config(weights="balanced"), both[0], both[1])
    np.testing.assert_allclose(drawn.supervised[[0, 6, 8, 12]], [4 / 6, 4 / 2, 4 / 4, 1], rtol=1e-6)


def test_a_batch_carries_what_was_said_of_its_rows() -> None:
    said = np.arange(12.0).reshape(4, C)
    train = with_teacher(rows([0, 1, 2, 0]), said, labelled=True)
    joined = train.subset(np.asarray([3, 1])).concatenated(with_teacher(rows([NONE]), -said[:1], labelled=False))
    found = joined.batch(np.asarray([2, 0])).labels_N
    wanted = [[1, 0, 0, 0, -0.0, -1, -2, 0], [1, 1, 0, 0, 9, 10, 11, 1]]
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float32))
    assert rows([0]).batch(np.asarray([0])).labels_N.shape == (1, 1 + C)
