"""The configured loss against the same written out, and that weights and cuts of a batch do what they say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.config.sections.classes_config import ClassesConfig
from workbench.losses.criterion import criterion

torch.manual_seed(0)
LOGITS = torch.randn(6, 3)
HOT = F.one_hot(torch.tensor([0, 1, 2, 2, 0, 2]), 3).float()
WEIGHTS = torch.tensor([1.0, 0.5, 2.0, 1.0, 0.25, 3.0])


def loss(targets: Tensor, weights: Tensor = WEIGHTS, logits: Tensor = LOGITS, **settings: Any) -> Tensor:
    objective = criterion(ClassesConfig.model_validate(settings), targets)
    return objective(logits, torch.cat([weights[:, None], targets], dim=1), 1 / 6)


def test_one_class_is_weighted_cross_entropy() -> None:
    each = F.cross_entropy(LOGITS, HOT.argmax(1), reduction="none")
    torch.testing.assert_close(loss(HOT), (each * WEIGHTS).sum() / 6)
    smooth = F.cross_entropy(LOGITS, HOT.argmax(1), reduction="none", label_smoothing=0.1)
    torch.testing.assert_close(loss(HOT, smoothing=0.1), (smooth * WEIGHTS).sum() / 6)


def test_logit_adjustment_adds_the_log_frequencies() -> None:
    moved = LOGITS + 1.5 * torch.tensor([2 / 6, 1 / 6, 3 / 6]).log()
    torch.testing.assert_close(loss(HOT, logit_adjustment=1.5), loss(HOT, logits=moved))


def test_several_classes_are_questions_of_their_own() -> None:
    targets = torch.tensor([[1.0, 1, 0], [0, 0, 0], [1, 0, 1], [0, 1, 0], [1, 1, 1], [0, 0, 1]])
    each = F.binary_cross_entropy_with_logits(LOGITS, targets * 0.8 + 0.1, reduction="none").sum(1)
    torch.testing.assert_close(loss(targets, kind="several", smoothing=0.2), (each * WEIGHTS).sum() / 6)


def test_numbers() -> None:
    targets = torch.tensor([[0.5], [1.0], [-2.0], [0.0], [0.1], [3.0]])
    wanted = ((LOGITS[:, 0] - targets[:, 0]) ** 2 * WEIGHTS).sum() / 6
    torch.testing.assert_close(loss(targets, logits=LOGITS[:, :1], kind="number"), wanted)


@pytest.mark.parametrize("settings", [{"gamma": 2.0}, {"smoothing": 0.1}, {"kind": "several", "gamma": 1.0}])
def test_a_weight_counts_like_repeated_rows_and_parts_add_up(settings: dict[str, Any]) -> None:
    config = ClassesConfig.model_validate(settings)
    objective = criterion(config, HOT)
    rows = torch.cat([torch.tensor([1.0, 2, 3, 1, 1, 2])[:, None], HOT], dim=1)
    repeats = torch.tensor([0, 1, 1, 2, 2, 2, 3, 4, 5, 5])
    ones = torch.cat([torch.ones(10, 1), HOT[repeats]], dim=1)
    whole = objective(LOGITS, rows, 0.5)
    torch.testing.assert_close(whole, objective(LOGITS[repeats], ones, 0.5))
    torch.testing.assert_close(whole, objective(LOGITS[:2], rows[:2], 0.5) + objective(LOGITS[2:], rows[2:], 0.5))
