"""Losses of one's own loop against their formulas, written with other words."""

from __future__ import annotations

import math

import pytest
import torch

from workbench.losses.token_objectives import OBJECTIVES, surrogate

LOG_P = [-0.1, -2.0, -0.7, -1.5]
INPUTS = {"logprobs": [-0.4, -1.2, -0.7, -3.0], "advantages": [1.0, -2.0, 0.5, 3.0], "weights": [0.0, 2.0, -1.0, 0.5]}


def by_hand(name: str, log_p: float, log_q: float, a: float, w: float) -> float:
    r = math.exp(log_p) / math.exp(log_q)
    bounded = min(max(r, 0.8), 1.2)
    return {
        "cross_entropy": -w * log_p,
        "importance_sampling": -r * a,
        "ppo": -min(r * a, bounded * a),
        "cispo": -bounded * a * log_p,
        "dro": -(a * log_p - 0.5 * 0.05 * (log_p - log_q) ** 2),
    }[name]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_equals_its_formula(name: str) -> None:
    objective = OBJECTIVES[name]
    log_p = torch.tensor(LOG_P, dtype=torch.float64)
    inputs = {key: torch.tensor(values, dtype=torch.float64) for key, values in INPUTS.items()}
    wanted = sum(by_hand(name, *each) for each in zip(LOG_P, *INPUTS.values(), strict=True))
    assert float(objective.loss(log_p, inputs, objective.settings)) == pytest.approx(wanted, rel=1e-12)


def test_clipped_ratios_get_no_gradient() -> None:
    """PPO stops where a ratio has gone far enough; CISPO goes on."""
    inputs = {"logprobs": torch.tensor([-2.0, -2.0]), "advantages": torch.tensor([1.0, -1.0])}
    grads = {}
    for name in ("ppo", "cispo"):
        log_p = torch.tensor([-1.0, -3.0], requires_grad=True)
        OBJECTIVES[name].loss(log_p, inputs, OBJECTIVES[name].settings).backward()
        grads[name] = log_p.grad
    assert grads["ppo"].tolist() == [0, 0]
    torch.testing.assert_close(grads["cispo"], torch.tensor([-1.2, 0.8]))


def test_surrogate_has_the_gradient_of_the_loss() -> None:
    log_p = [torch.tensor(LOG_P, requires_grad=True), torch.tensor([-1.0], requires_grad=True)]
    loss = (torch.cat(log_p).exp().sum() - 2).square()
    wanted = torch.autograd.grad(loss, log_p, retain_graph=True)
    weights = surrogate(loss, log_p)
    for each, weight, grad in zip(log_p, weights, wanted, strict=True):
        again = OBJECTIVES["cross_entropy"].loss(each, {"weights": weight}, {})
        torch.testing.assert_close(torch.autograd.grad(again, each)[0], grad)
