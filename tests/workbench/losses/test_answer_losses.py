"""Ties among judged answers: each loss against its formula by the standard library, and whichever answer is first."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from workbench.config.sections.prefer_config import WITH_TIES, PreferConfig
from workbench.losses import answer_losses, preferences
from workbench.losses.answer_losses import Answers

BETA = 0.3
SUMS = [-4.0, -9.0, -700.0, -3.0, -6.0, -6.0]
MEANS = [-0.5, -1.5, -2.0, -0.1, -0.7, -0.7]
REFERENCE = [-5.0, -7.0, -600.0, -4.0, -6.0, -6.0]


def judged(config: PreferConfig, tie: list[bool], *, swapped: bool = False) -> Tensor:
    """Losses of three pairs."""
    order = [1, 0, 3, 2, 5, 4] if swapped else list(range(6))
    sums, means, reference = (torch.tensor(each, dtype=torch.float64)[order] for each in (SUMS, MEANS, REFERENCE))
    return answer_losses.judge(
        Answers(means if config.averages else sums, means),
        reference if config.compares else None,
        config,
        beta=BETA,
        desired_B=torch.tensor([True, False] * 3),
        margin_P=torch.zeros(3, dtype=torch.float64),
        tie_P=torch.tensor(tie),
    ).loss_P


def entropy(gap: float) -> float:
    """The cross entropy of sigmoid(gap) with the target 1/2."""
    return 0.5 * math.log1p(math.exp(-abs(gap))) + 0.5 * (abs(gap) + math.log1p(math.exp(-abs(gap))))


def log_odds(mean: float) -> float:
    return mean - math.log1p(-math.exp(mean))


@pytest.mark.parametrize("loss", WITH_TIES)
def test_a_tie_equals_its_formula_in_both_orders(loss: str) -> None:
    config = PreferConfig(loss=loss, beta=BETA)  # type: ignore[arg-type]
    found = judged(config, [True] * 3)
    torch.testing.assert_close(judged(config, [True] * 3, swapped=True), found, rtol=1e-14, atol=0)
    for pair, value in enumerate(found.tolist()):
        (first, second), (one, other) = SUMS[2 * pair : 2 * pair + 2], MEANS[2 * pair : 2 * pair + 2]
        known = REFERENCE[2 * pair : 2 * pair + 2] if config.compares else [0.0, 0.0]
        gap = first - known[0] - second + known[1]
        expected = {
            "ipo": lambda gap=gap: gap**2,
            "orpo": lambda one=one, other=other: BETA * entropy(log_odds(one) - log_odds(other)),
        }.get(loss, lambda gap=gap: entropy(BETA * gap))()
        assert value == pytest.approx(expected - config.sft_factor * (one + other) / 2, rel=1e-9)


@pytest.mark.parametrize("loss", WITH_TIES)
def test_other_pairs_are_as_they_were(loss: str) -> None:
    config = PreferConfig(loss=loss, beta=BETA)  # type: ignore[arg-type]
    mixed, without = judged(config, [False, True, False]), judged(config, [False] * 3)
    torch.testing.assert_close(mixed[[0, 2]], without[[0, 2]], rtol=0, atol=0)
    assert mixed[1] != without[1]


def test_a_tie_is_the_limit_of_cdpo_and_the_mean_of_robust() -> None:
    gap = torch.tensor([-3.0, 0.0, 0.4, 50.0], dtype=torch.float64)
    found = preferences.tie(gap, beta=BETA)
    torch.testing.assert_close(found, preferences.conservative(gap, beta=BETA, smoothing=0.5))
    both = [preferences.robust(sign * gap, beta=BETA, smoothing=0.2) for sign in (1, -1)]
    torch.testing.assert_close(found, (both[0] + both[1]) / 2)
    assert torch.autograd.gradcheck(lambda g: preferences.tie(g, beta=BETA), [gap.clone().requires_grad_()])
