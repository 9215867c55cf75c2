"""Classification losses against their equations written a second time, and what they must not depend on."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from workbench.config.sections.classes_config import ClassesConfig
from workbench.losses import class_losses
from workbench.losses.class_losses import criterion

LOGITS_CRITERION = torch.randn(6, 3)
HOT = F.one_hot(torch.tensor([0, 1, 2, 2, 0, 2]), 3).float()
WEIGHTS = torch.tensor([1.0, 0.5, 2.0, 1.0, 0.25, 3.0])


torch.manual_seed(0)


LOGITS = torch.randn(6, 4, dtype=torch.float64).float()


LABELS = torch.tensor([0, 3, 1, 1, 2, 0])


HARD = F.one_hot(LABELS, 4).float()


ONES = torch.ones(6)


def test_cross_entropy_is_torchs_with_weights_and_smoothing() -> None:
    wanted = F.cross_entropy(LOGITS, LABELS, reduction="sum")
    torch.testing.assert_close(class_losses.cross_entropy(LOGITS, HARD, ONES), wanted)
    weight_C = torch.tensor([1.0, 2.0, 0.5, 3.0])
    wanted = F.cross_entropy(LOGITS, LABELS, weight=weight_C, reduction="sum")
    torch.testing.assert_close(class_losses.cross_entropy(LOGITS, HARD, weight_C[LABELS]), wanted)
    wanted = F.cross_entropy(LOGITS, LABELS, label_smoothing=0.1, reduction="sum")
    torch.testing.assert_close(class_losses.cross_entropy(LOGITS, class_losses.smooth(HARD, 0.1), ONES), wanted)


@given(st.floats(0.1, 5.0))
def test_focal_loss_row_by_row(gamma: float) -> None:
    wanted = 0.0
    for logits, label in zip(LOGITS.tolist(), LABELS.tolist(), strict=True):
        p = math.exp(logits[label]) / sum(map(math.exp, logits))
        wanted -= (1 - p) ** gamma * math.log(p)
    assert float(class_losses.cross_entropy(LOGITS, HARD, ONES, gamma=gamma)) == pytest.approx(wanted, rel=1e-4)


@given(st.floats(0.1, 5.0))
def test_two_classes_are_one_question(gamma: float) -> None:
    """Focal loss of two classes with logits (0, z) is the binary one of z."""
    z, yes = LOGITS[:, :1], (LABELS % 2)[:, None].float()
    both = torch.cat((torch.zeros_like(z), z), dim=1)
    binary = class_losses.binary_cross_entropy(z, yes, ONES, gamma=gamma)
    torch.testing.assert_close(
        binary, class_losses.cross_entropy(both, torch.cat((1 - yes, yes), 1), ONES, gamma=gamma)
    )


@pytest.mark.parametrize("gamma", [0.1, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("loss", [class_losses.cross_entropy, class_losses.binary_cross_entropy])
def test_saturated_rows_have_the_gradients_of_their_limit(loss: Any, gamma: float) -> None:
    """At p = 1 the loss and its gradient vanish; at p = 0 the gradient is that of the plain logarithm."""
    logits = torch.tensor([[200.0, -200.0], [-200.0, 200.0], [1.0, -1.0]], requires_grad=True)
    target = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    loss(logits, target, torch.ones(3), gamma=gamma).backward()
    assert logits.grad is not None and bool(logits.grad.isfinite().all())
    torch.testing.assert_close(logits.grad[0], torch.zeros(2))
    torch.testing.assert_close(logits.grad[1], torch.tensor([-1.0, 1.0]))


def test_binary_cross_entropy_is_torchs() -> None:
    target = (torch.rand(6, 4) > 0.5).float()
    wanted = F.binary_cross_entropy_with_logits(LOGITS, target, reduction="sum")
    torch.testing.assert_close(class_losses.binary_cross_entropy(LOGITS, target, ONES), wanted)


def test_squared_error() -> None:
    wanted = sum((a - b) ** 2 for a, b in zip(LOGITS.flatten().tolist(), HARD.flatten().tolist(), strict=True))
    assert float(class_losses.squared_error(LOGITS, HARD, ONES)) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    "loss", [class_losses.cross_entropy, class_losses.binary_cross_entropy, class_losses.squared_error]
)
def test_parts_of_a_batch_add_up_and_rows_without_weight_do_not_count(loss: class_losses.Loss) -> None:
    whole = loss(LOGITS, HARD, ONES)
    torch.testing.assert_close(loss(LOGITS[:2], HARD[:2], ONES[:2]) + loss(LOGITS[2:], HARD[2:], ONES[2:]), whole)
    some = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    torch.testing.assert_close(loss(LOGITS, HARD, some), loss(LOGITS[:2], HARD[:2], ONES[:2]))


def test_logit_adjustment_learns_away_the_prior() -> None:
    """Fitted to frequencies alone, plain logits become the log prior, and adjusted ones become equal."""
    prior = torch.tensor([0.7, 0.2, 0.1])
    logits = torch.zeros(1, 3, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.05)
    for _ in range(500):
        optimizer.zero_grad()
        class_losses.cross_entropy(
            class_losses.logit_adjusted(logits, prior.log(), 1.0), prior[None], torch.ones(1)
        ).backward()
        optimizer.step()
    found = logits.detach()[0]
    torch.testing.assert_close(found - found.mean(), torch.zeros(3), atol=1e-3, rtol=0)


@given(st.lists(st.integers(1, 500), min_size=2, max_size=8), st.floats(0.5, 0.9999))
def test_class_weights_have_mean_one_over_the_rows_and_help_the_rare(counts: list[int], beta: float) -> None:
    for scheme in ("none", "balanced", "effective"):
        weights = class_losses.class_weights(torch.tensor(counts), scheme=scheme, beta=beta)
        mean = (weights * torch.tensor(counts)).sum() / sum(counts)
        assert float(mean) == pytest.approx(1, rel=1e-4)
        order = sorted(range(len(counts)), key=counts.__getitem__)
        assert all(weights[a] >= weights[b] - 1e-6 for a, b in pairwise(order))


def test_effective_numbers_written_again() -> None:
    counts, beta = [10, 100, 1000], 0.99
    raw = [(1 - beta) / (1 - beta**n) for n in counts]
    scale = sum(counts) / sum(w * n for w, n in zip(raw, counts, strict=True))
    found = class_losses.class_weights(torch.tensor(counts), scheme="effective", beta=beta)
    assert found.tolist() == pytest.approx([w * scale for w in raw], rel=1e-5)


def loss(targets: Tensor, weights: Tensor = WEIGHTS, logits: Tensor = LOGITS_CRITERION, **settings: Any) -> Tensor:
    objective = criterion(ClassesConfig.model_validate(settings), targets)
    return objective(logits, torch.cat([weights[:, None], targets], dim=1), 1 / 6)


def test_one_class_is_weighted_cross_entropy() -> None:
    each = F.cross_entropy(LOGITS_CRITERION, HOT.argmax(1), reduction="none")
    torch.testing.assert_close(loss(HOT), (each * WEIGHTS).sum() / 6)
    smooth = F.cross_entropy(LOGITS_CRITERION, HOT.argmax(1), reduction="none", label_smoothing=0.1)
    torch.testing.assert_close(loss(HOT, smoothing=0.1), (smooth * WEIGHTS).sum() / 6)


def test_logit_adjustment_adds_the_log_frequencies() -> None:
    moved = LOGITS_CRITERION + 1.5 * torch.tensor([2 / 6, 1 / 6, 3 / 6]).log()
    torch.testing.assert_close(loss(HOT, logit_adjustment=1.5), loss(HOT, logits=moved))


def test_several_classes_are_questions_of_their_own() -> None:
    targets = torch.tensor([[1.0, 1, 0], [0, 0, 0], [1, 0, 1], [0, 1, 0], [1, 1, 1], [0, 0, 1]])
    each = F.binary_cross_entropy_with_logits(LOGITS_CRITERION, targets * 0.8 + 0.1, reduction="none").sum(1)
    torch.testing.assert_close(loss(targets, kind="several", smoothing=0.2), (each * WEIGHTS).sum() / 6)


def test_numbers() -> None:
    targets = torch.tensor([[0.5], [1.0], [-2.0], [0.0], [0.1], [3.0]])
    wanted = ((LOGITS_CRITERION[:, 0] - targets[:, 0]) ** 2 * WEIGHTS).sum() / 6
    torch.testing.assert_close(loss(targets, logits=LOGITS_CRITERION[:, :1], kind="number"), wanted)


@pytest.mark.parametrize("settings", [{"gamma": 2.0}, {"smoothing": 0.1}, {"kind": "several", "gamma": 1.0}])
def test_a_weight_counts_like_repeated_rows_and_parts_add_up(settings: dict[str, Any]) -> None:
    config = ClassesConfig.model_validate(settings)
    objective = criterion(config, HOT)
    rows = torch.cat([torch.tensor([1.0, 2, 3, 1, 1, 2])[:, None], HOT], dim=1)
    repeats = torch.tensor([0, 1, 1, 2, 2, 2, 3, 4, 5, 5])
    ones = torch.cat([torch.ones(10, 1), HOT[repeats]], dim=1)
    whole = objective(LOGITS_CRITERION, rows, 0.5)
    torch.testing.assert_close(whole, objective(LOGITS_CRITERION[repeats], ones, 0.5))
    torch.testing.assert_close(
        whole, objective(LOGITS_CRITERION[:2], rows[:2], 0.5) + objective(LOGITS_CRITERION[2:], rows[2:], 0.5)
    )
