"""The loss of a reward model equals its formula, written out for each pair."""

from __future__ import annotations

import math

import pytest
import torch

from workbench.losses.reward_losses import bradley_terry

CHOSEN, REJECTED, MARGIN = [0.5, -1.0, 30.0, -40.0], [0.2, 0.7, -30.0, 60.0], [0.0, 0.5, 1.0, 0.0]


def tensors(*values: list[float]) -> list[torch.Tensor]:
    return [torch.tensor(each, dtype=torch.float64) for each in values]


def test_equals_the_formula() -> None:
    found = bradley_terry(*tensors(CHOSEN, REJECTED, MARGIN), centre=0.1)
    for loss, chosen, rejected, margin in zip(found.tolist(), CHOSEN, REJECTED, MARGIN, strict=True):
        gap = chosen - rejected - margin
        log_sigmoid = -math.log1p(math.exp(-gap)) if gap > -30 else gap
        assert loss == pytest.approx(-log_sigmoid + 0.1 * (chosen + rejected) ** 2, rel=1e-12)


def test_equal_rewards_cost_ln_2_and_what_is_shared_cancels() -> None:
    even = tensors([3.0], [3.0], [0.0])
    assert bradley_terry(*even, centre=0.0).item() == pytest.approx(math.log(2))
    chosen, rejected, margin = tensors([0.4], [-0.3], [0.1])
    shifted = bradley_terry(chosen + 5, rejected + 5, margin, centre=0.0)
    torch.testing.assert_close(shifted, bradley_terry(chosen, rejected, margin, centre=0.0))
    one, other = (bradley_terry(*pair, margin * 0, centre=0.0) for pair in ((chosen, rejected), (rejected, chosen)))
    torch.testing.assert_close(one - other, rejected - chosen)


def test_gradients() -> None:
    """By finite differences, in float64."""
    leaves = [each.requires_grad_() for each in tensors(CHOSEN[:2], REJECTED[:2])]
    margin = torch.tensor(MARGIN[:2], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda c, r: bradley_terry(c, r, margin, centre=0.3), leaves)
