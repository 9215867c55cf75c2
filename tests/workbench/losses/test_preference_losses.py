"""Losses of judged answers against their equations, written a second time in float64 with the standard library.

What the papers say of them is tested too: values where nothing was learnt yet, what a swap does, which terms cancel.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from workbench.config.sections.prefer_config import WITH_TIES, PreferConfig
from workbench.losses import preference_losses
from workbench.losses.preference_losses import Answers

BETA, EPSILON, GAMMA = 0.3, 0.2, 0.7
DIFFERENCES = [-30.0, -2.5, -0.1, 0.0, 0.4, 3.0, 40.0]
BETA_ANSWER_LOSSES = 0.3
SUMS = [-4.0, -9.0, -700.0, -3.0, -6.0, -6.0]
MEANS = [-0.5, -1.5, -2.0, -0.1, -0.7, -0.7]
REFERENCE = [-5.0, -7.0, -600.0, -4.0, -6.0, -6.0]


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def sigmoid(x: float) -> float:
    return math.exp(log_sigmoid(x))


OF_DIFFERENCES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[float], float]]] = {
    "dpo": (lambda d: preference_losses.dpo(d, beta=BETA), lambda d: -log_sigmoid(BETA * d)),
    "offset": (
        lambda d: preference_losses.dpo(d, beta=BETA, margin_B=1.5),
        lambda d: -math.log(1 / (1 + math.exp(-(BETA * d - 1.5)))),
    ),
    "ipo": (lambda d: preference_losses.ipo(d, beta=BETA), lambda d: (d - 1 / (2 * BETA)) ** 2),
    "hinge": (lambda d: preference_losses.hinge(d, beta=BETA), lambda d: max(0.0, 1 - BETA * d)),
    "conservative": (
        lambda d: preference_losses.conservative(d, beta=BETA, smoothing=EPSILON),
        lambda d: -(1 - EPSILON) * log_sigmoid(BETA * d) - EPSILON * log_sigmoid(-BETA * d),
    ),
    "robust": (
        lambda d: preference_losses.robust(d, beta=BETA, smoothing=EPSILON),
        lambda d: (-(1 - EPSILON) * log_sigmoid(BETA * d) + EPSILON * log_sigmoid(-BETA * d)) / (1 - 2 * EPSILON),
    ),
}


@pytest.mark.parametrize("name", OF_DIFFERENCES)
def test_losses_of_differences_equal_their_equations(name: str) -> None:
    loss, equation = OF_DIFFERENCES[name]
    found = loss(torch.tensor(DIFFERENCES, dtype=torch.float64))
    assert found.tolist() == pytest.approx([equation(each) for each in DIFFERENCES], rel=1e-12, abs=1e-12)


def test_losses_of_pairs_without_a_reference_equal_their_equations() -> None:
    chosen, rejected = [-0.1, -2.0, -1e-9, -40.0], [-0.3, -1.0, -3.0, -0.5]
    c, r = torch.tensor(chosen, dtype=torch.float64), torch.tensor(rejected, dtype=torch.float64)

    def odds(log_p: float) -> float:
        return math.exp(log_p) / -math.expm1(log_p)

    pairs = list(zip(chosen, rejected, strict=True))
    expected = {
        "simpo": [-log_sigmoid(BETA * (x - y) - GAMMA) for x, y in pairs],
        "cpo": [-log_sigmoid(BETA * (x - y)) for x, y in pairs],
        "orpo": [-log_sigmoid(math.log(odds(x) / odds(y))) for x, y in pairs],
    }
    found = {
        "simpo": preference_losses.simpo(c, r, beta=BETA, gamma=GAMMA),
        "cpo": preference_losses.cpo(c, r, beta=BETA),
        "orpo": preference_losses.orpo(c, r),
    }
    for name, values in found.items():
        assert values.tolist() == pytest.approx(expected[name], rel=1e-9), name


def test_kto_equals_its_equation() -> None:
    ratios, desired, z = [-3.0, -0.5, 0.2, 5.0], [True, False, True, False], 0.4
    found = preference_losses.kto(
        torch.tensor(ratios, dtype=torch.float64),
        torch.tensor(desired),
        z,
        beta=BETA,
        desirable=1.3,
        undesirable=0.6,
    )
    wanted = [
        1.3 * (1 - sigmoid(BETA * (r - z))) if good else 0.6 * (1 - sigmoid(BETA * (z - r)))
        for r, good in zip(ratios, desired, strict=True)
    ]
    assert found.tolist() == pytest.approx(wanted, rel=1e-12)
    assert (
        preference_losses.kto_baseline(torch.tensor(-0.2)) == 0
        and preference_losses.kto_baseline(torch.tensor(0.2)) > 0
    )


def test_values_where_nothing_was_learnt_yet() -> None:
    zero = torch.zeros(1, dtype=torch.float64)
    assert preference_losses.dpo(zero, beta=BETA).item() == pytest.approx(math.log(2))
    assert preference_losses.conservative(zero, beta=BETA, smoothing=EPSILON).item() == pytest.approx(math.log(2))
    assert preference_losses.robust(zero, beta=BETA, smoothing=EPSILON).item() == pytest.approx(math.log(2))
    assert preference_losses.ipo(zero, beta=BETA).item() == pytest.approx((1 / (2 * BETA)) ** 2)
    assert preference_losses.hinge(zero, beta=BETA).item() == 1
    for good in (True, False):
        found = preference_losses.kto(zero, torch.tensor([good]), 0.0, beta=BETA, desirable=1.4, undesirable=0.8)
        assert found.item() == pytest.approx((1.4 if good else 0.8) / 2)


@pytest.mark.parametrize("name", OF_DIFFERENCES)
def test_the_slope_pulls_an_even_pair_towards_the_chosen_answer(name: str) -> None:
    difference = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(OF_DIFFERENCES[name][0](difference).sum(), difference)
    assert slope < 0


def test_robust_is_right_on_average_over_flips() -> None:
    """The mean over judgements, a share e of which are the wrong way round, is the loss of right ones."""
    d = torch.tensor(DIFFERENCES, dtype=torch.float64)
    mean = (1 - EPSILON) * preference_losses.robust(d, beta=BETA, smoothing=EPSILON)
    mean += EPSILON * preference_losses.robust(-d, beta=BETA, smoothing=EPSILON)
    torch.testing.assert_close(mean, preference_losses.dpo(d, beta=BETA))


def test_noise_that_is_not_there_is_dpo() -> None:
    d = torch.tensor(DIFFERENCES, dtype=torch.float64)
    for loss in (preference_losses.conservative, preference_losses.robust):
        torch.testing.assert_close(loss(d, beta=BETA, smoothing=0.0), preference_losses.dpo(d, beta=BETA))


@pytest.mark.parametrize("name", OF_DIFFERENCES)
def test_gradcheck_of_differences(name: str) -> None:
    inside = torch.tensor([-1.5, -0.2, 0.3, 1.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(OF_DIFFERENCES[name][0], (inside,))


def test_gradcheck_of_the_others() -> None:
    chosen = torch.tensor([-0.4, -2.0, -1.2], dtype=torch.float64, requires_grad=True)
    rejected = torch.tensor([-1.4, -0.3, -1.3], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(preference_losses.orpo, (chosen, rejected))
    assert torch.autograd.gradcheck(
        lambda c, r: preference_losses.simpo(c, r, beta=BETA, gamma=GAMMA), (chosen, rejected)
    )
    assert torch.autograd.gradcheck(lambda c, r: preference_losses.cpo(c, r, beta=BETA), (chosen, rejected))
    desired = torch.tensor([True, False, True])
    assert torch.autograd.gradcheck(lambda r: preference_losses.kto(r, desired, 0.2, beta=BETA), (chosen,))


def test_log_odds_of_sure_and_of_hopeless_answers_are_finite() -> None:
    log_p = torch.tensor([-1e-30, -0.0, -1e4], requires_grad=True)
    found = preference_losses.log_odds(log_p)
    (slope,) = torch.autograd.grad(found.sum(), log_p)
    assert found.isfinite().all() and slope.isfinite().all()


def test_tokens_beyond_the_shorter_answer_count_by_alpha() -> None:
    random.seed(0)
    log_p = [[random.uniform(-3, 0) for _ in range(count)] for count in (6, 4)]
    place = torch.tensor([*range(6), *range(4)])
    values = torch.tensor([*log_p[0], *log_p[1]], dtype=torch.float64)
    for alpha in (0.0, 0.3, 1.0):
        factors = preference_losses.token_factors(place, torch.full((10,), 4), alpha=alpha)
        found = (values * factors)[:6].sum()
        assert found.item() == pytest.approx(sum(log_p[0][:4]) + alpha * sum(log_p[0][4:]))
        assert (values * factors)[6:].sum().item() == pytest.approx(sum(log_p[1]))


def judged(config: PreferConfig, tie: list[bool], *, swapped: bool = False) -> Tensor:
    """Losses of three pairs."""
    order = [1, 0, 3, 2, 5, 4] if swapped else list(range(6))
    sums, means, reference = (torch.tensor(each, dtype=torch.float64)[order] for each in (SUMS, MEANS, REFERENCE))
    return preference_losses.judge(
        Answers(means if config.averages else sums, means),
        reference if config.compares else None,
        config,
        beta=BETA_ANSWER_LOSSES,
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
    config = PreferConfig(loss=loss, beta=BETA_ANSWER_LOSSES)  # type: ignore[arg-type]
    found = judged(config, [True] * 3)
    torch.testing.assert_close(judged(config, [True] * 3, swapped=True), found, rtol=1e-14, atol=0)
    for pair, value in enumerate(found.tolist()):
        (first, second), (one, other) = SUMS[2 * pair : 2 * pair + 2], MEANS[2 * pair : 2 * pair + 2]
        known = REFERENCE[2 * pair : 2 * pair + 2] if config.compares else [0.0, 0.0]
        gap = first - known[0] - second + known[1]
        expected = {
            "ipo": lambda one=one, other=other, known=known: (one - known[0] - other + known[1]) ** 2,
            "orpo": lambda one=one, other=other: BETA_ANSWER_LOSSES * entropy(log_odds(one) - log_odds(other)),
        }.get(loss, lambda gap=gap: entropy(BETA_ANSWER_LOSSES * gap))()
        assert value == pytest.approx(expected - config.sft_factor * (one + other) / 2, rel=1e-9)


@pytest.mark.parametrize("loss", WITH_TIES)
def test_other_pairs_are_as_they_were(loss: str) -> None:
    config = PreferConfig(loss=loss, beta=BETA_ANSWER_LOSSES)  # type: ignore[arg-type]
    mixed, without = judged(config, [False, True, False]), judged(config, [False] * 3)
    torch.testing.assert_close(mixed[[0, 2]], without[[0, 2]], rtol=0, atol=0)
    assert mixed[1] != without[1]


def test_a_tie_is_the_limit_of_cdpo_and_the_mean_of_robust() -> None:
    gap = torch.tensor([-3.0, 0.0, 0.4, 50.0], dtype=torch.float64)
    found = preference_losses.tie(gap, beta=BETA_ANSWER_LOSSES)
    torch.testing.assert_close(found, preference_losses.conservative(gap, beta=BETA_ANSWER_LOSSES, smoothing=0.5))
    both = [preference_losses.robust(sign * gap, beta=BETA_ANSWER_LOSSES, smoothing=0.2) for sign in (1, -1)]
    torch.testing.assert_close(found, (both[0] + both[1]) / 2)
    assert torch.autograd.gradcheck(
        lambda g: preference_losses.tie(g, beta=BETA_ANSWER_LOSSES), [gap.clone().requires_grad_()]
    )
