"""R-Drop: its equation written out a second time, and its limits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.config.sections.classes_config import ClassesConfig, Kind
from workbench.losses import r_drop
from workbench.losses.class_losses import criterion
from workbench.losses.next_token import NO_LABEL, next_token

HEAD_VD = torch.randn(7, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def hidden(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()


def project(hidden_nD: Tensor) -> Tensor:
    return hidden_nD @ HEAD_VD.T


def loss_of(hidden_ND: Tensor, labels_N: Tensor, **settings: float) -> Tensor:
    return next_token(hidden_ND, labels_N, project, vocabulary=7, weights=[], scale=0.5, **settings)  # type: ignore[arg-type]


def test_tokens_have_the_mean_loss_and_the_mean_of_both_divergences() -> None:
    hidden_N2D, labels_N = hidden(5, 2, 4), torch.tensor([3, 0, NO_LABEL, 6, 2])
    found = loss_of(hidden_N2D, labels_N, r_drop=1.5)
    one, two = (project(hidden_N2D[:, at]).log_softmax(-1) for at in (0, 1))
    apart_N = (
        F.kl_div(one, two, reduction="none", log_target=True) + F.kl_div(two, one, reduction="none", log_target=True)
    ).sum(-1) / 2
    mean = (F.nll_loss(one, labels_N, reduction="sum") + F.nll_loss(two, labels_N, reduction="sum")) / 2
    wanted = (mean + 1.5 * apart_N[labels_N != NO_LABEL].sum()) * 0.5
    torch.testing.assert_close(found, wanted)
    gradients = [torch.autograd.grad(each, hidden_N2D)[0] for each in (found, wanted)]
    torch.testing.assert_close(*gradients)


def test_equal_passes_have_the_loss_of_one() -> None:
    hidden_ND, labels_N = hidden(5, 4), torch.tensor([3, 0, NO_LABEL, 6, 2])
    twice = loss_of(torch.stack([hidden_ND, hidden_ND], 1), labels_N, r_drop=5.0, z_loss=0.1, smoothing=0.1)
    torch.testing.assert_close(twice, loss_of(hidden_ND, labels_N, z_loss=0.1, smoothing=0.1))


@pytest.mark.parametrize("kind", ["one", "several", "number"])
def test_rows_that_weigh_nothing_do_not_matter_and_the_divergence_is_that_of_their_kind(kind: Kind) -> None:
    targets_NC = torch.eye(3)[[0, 2, 1, 1]] if kind != "number" else torch.randn(4, 1)
    labels_N = torch.cat([torch.tensor([[1.0], [2.0], [0.0], [1.0]]), targets_NC], 1)
    objective = criterion(ClassesConfig(kind=kind), targets_NC)
    first, second = torch.randn(2, 4, targets_NC.shape[1]).unbind()
    found = r_drop.twice(objective, 2.0, kind)(torch.cat([first, second]), labels_N, 0.25)
    if kind == "number":
        apart = (first - second) ** 2
    else:
        spread = [each[..., None] * torch.tensor([1.0, 0.0]) if kind == "several" else each for each in (first, second)]
        one, two = (each.log_softmax(-1) for each in spread)
        apart = ((one.exp() - two.exp()) * (one - two)).flatten(1) / 2
    mean = (objective(first, labels_N, 0.25) + objective(second, labels_N, 0.25)) / 2
    torch.testing.assert_close(found, mean + 2.0 * 0.25 * (apart.sum(-1) * labels_N[:, 0]).sum())
    changed = torch.cat([first, second])
    changed[2] += 9.0
    torch.testing.assert_close(r_drop.twice(objective, 2.0, kind)(changed, labels_N, 0.25), found)
