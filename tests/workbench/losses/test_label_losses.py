"""The losses of single labels add up to the loss that trains, and nobody who listens changes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from workbench.config.sections.classes_config import ClassesConfig
from workbench.losses.class_losses import criterion
from workbench.losses.label_losses import LabelTap, class_losses, token_losses
from workbench.losses.next_token import NO_LABEL, next_token

N, C, D, V = 7, 3, 5, 11


def test_tokens_add_up_and_the_gradient_is_the_same() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(N, D, requires_grad=True), torch.randn(V, D)
    labels = torch.randint(V, (N,))
    labels[2] = NO_LABEL
    tap, found = LabelTap(token_losses), []

    def loss(tap: LabelTap | None) -> tuple[torch.Tensor, torch.Tensor]:
        value = next_token(hidden, labels, lambda rows: rows @ weight.T, vocabulary=V, weights=[], scale=0.5, tap=tap)
        return value.detach(), torch.autograd.grad(value, hidden)[0]

    plain = loss(None)
    with tap.listening() as parts:
        heard = loss(tap)
        found = list(parts)
    assert torch.equal(plain[0], heard[0]) and torch.equal(plain[1], heard[1])
    losses = torch.cat([part.loss_N for part in found])[:N][labels != NO_LABEL]
    right = torch.cat([part.right_N for part in found])[:N][labels != NO_LABEL]
    assert not losses.requires_grad
    torch.testing.assert_close(0.5 * losses.sum(), plain[0])
    logits = (hidden @ weight.T)[labels != NO_LABEL]
    assert torch.equal(right, logits.argmax(-1) == labels[labels != NO_LABEL])
    wanted = F.cross_entropy(hidden @ weight.T, labels, reduction="sum", ignore_index=NO_LABEL) * 0.5
    assert torch.allclose(plain[0], wanted.detach(), rtol=1e-6)
    loss(tap)
    assert found == list(parts), "nobody listens any more"


@pytest.mark.parametrize("kind", ["one", "pair", "several", "number"])
def test_rows_add_up_to_the_loss_that_trains(kind: Any) -> None:
    torch.manual_seed(1)
    outputs = torch.randn(N, 1 if kind == "number" else C)
    target = {
        "number": torch.randn(N, 1),
        "several": torch.randint(2, (N, C)).float(),
    }.get(kind, torch.eye(C)[torch.randint(C, (N,))])
    labels = torch.cat([torch.ones(N, 1), target], dim=1)
    found = class_losses(kind)(outputs, labels)
    objective = criterion(ClassesConfig(kind=kind), target if kind != "number" else target.abs())
    torch.testing.assert_close(found.loss_N.sum(), objective(outputs, labels, 1.0))
    expected = {
        "number": torch.zeros(N, dtype=torch.bool),
        "several": ((outputs.sigmoid() >= 0.5).float() == target).all(1),
    }.get(kind, outputs.argmax(1) == target.argmax(1))
    assert torch.equal(found.right_N, expected)
