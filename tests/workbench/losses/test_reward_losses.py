"""The loss of a reward model equals its formula, written out for each pair."""

from __future__ import annotations

import math

import pytest
import torch

from workbench.losses.reward_losses import bradley_terry, step_cross_entropy

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


def test_of_a_tie_the_target_is_one_half() -> None:
    tie = torch.tensor([True, False, True, False])
    chosen, rejected, margin = tensors(CHOSEN, REJECTED, [0.0, 0.5, 0.0, 0.0])
    found = bradley_terry(chosen, rejected, margin, centre=0.1, tie_P=tie)
    bare = bradley_terry(chosen, rejected, margin, centre=0.1)
    torch.testing.assert_close(found[~tie], bare[~tie], rtol=0, atol=0)
    for loss, first, second in zip(found[tie].tolist(), chosen[tie].tolist(), rejected[tie].tolist(), strict=True):
        gap = abs(first - second)
        entropy = 0.5 * math.log1p(math.exp(-gap)) + 0.5 * (gap + math.log1p(math.exp(-gap)))
        assert loss == pytest.approx(entropy + 0.1 * (first + second) ** 2, rel=1e-12)
    swapped = bradley_terry(rejected, chosen, margin, centre=0.1, tie_P=tie)
    torch.testing.assert_close(swapped[tie], found[tie], rtol=0, atol=0)
    leaves = [each[:3].clone().requires_grad_() for each in (chosen, rejected)]
    assert torch.autograd.gradcheck(
        lambda c, r: bradley_terry(c, r, margin[:3], centre=0.3, tie_P=torch.ones(3, dtype=torch.bool)), leaves
    )
    even = tensors([2.0], [2.0])
    even[0].requires_grad_()
    bradley_terry(*even, *tensors([0.0]), centre=0.0, tie_P=torch.tensor([True])).backward()
    assert even[0].grad == 0, "equal rewards are where a tie wants them"


def test_the_loss_of_a_step_equals_its_formula() -> None:
    logit, label = tensors([-2.0, 0.0, 0.7, 40.0], [0.0, 1.0, 0.25, 1.0])
    found = step_cross_entropy(logit, label)
    for loss, x, y in zip(found.tolist(), logit.tolist(), label.tolist(), strict=True):
        p = 1 / (1 + math.exp(-x))
        expected = -y * math.log(p) - ((1 - y) * math.log(1 - p) if y < 1 else 0)
        assert loss == pytest.approx(expected, rel=1e-9, abs=1e-15)
    torch.testing.assert_close(step_cross_entropy(-logit, 1 - label), found)
    leaves = [logit[:3].clone().requires_grad_()]
    assert torch.autograd.gradcheck(lambda x: step_cross_entropy(x, label[:3]), leaves)
