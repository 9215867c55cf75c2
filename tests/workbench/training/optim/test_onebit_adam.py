"""1-bit AdamW against torch's, and against the formula of its paper."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workbench.training.optim.onebit_adam import OneBitAdamW

RATE, BETAS, EPS, DECAY, STEPS, FROM = 0.01, (0.8, 0.95), 1e-8, 0.1, 9, 4


def made(kind: type[torch.optim.AdamW]) -> tuple[nn.Parameter, torch.optim.AdamW]:
    parameter = nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4))
    return parameter, kind([parameter], lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY)


def gradients() -> list[Tensor]:
    """Of each step; the last value has none until the second moment is kept."""
    found = list(torch.randn(STEPS, 3, 4, generator=torch.Generator().manual_seed(0)))
    for gradient in found[:FROM]:
        gradient[2, 3] = 0.0
    return found


def test_it_is_torchs_until_then() -> None:
    (one, ours), (other, torchs) = made(OneBitAdamW), made(torch.optim.AdamW)
    for gradient in gradients():
        one.grad, other.grad = gradient.clone(), gradient.clone()
        ours.step()
        torchs.step()
    assert torch.equal(one, other)


def trained() -> tuple[nn.Parameter, OneBitAdamW]:
    parameter, optimizer = made(OneBitAdamW)
    assert isinstance(optimizer, OneBitAdamW)
    for step, gradient in enumerate(gradients()):
        optimizer.frozen = step >= FROM
        parameter.grad = optimizer.momentum(parameter, gradient) if optimizer.frozen else gradient.clone()
        optimizer.step()
    return parameter, optimizer


def test_its_steps_are_those_of_the_paper() -> None:
    """One device, where codes leave nothing out; AdamW's bias corrections, as the paper leaves them out."""
    found, _ = trained()
    beta1, beta2 = BETAS
    value, momentum, second = made(OneBitAdamW)[0].detach().double(), torch.zeros(3, 4), torch.zeros(3, 4)
    for step, gradient in enumerate(gradients()):
        momentum = beta1 * momentum + (1 - beta1) * gradient
        if step < FROM:
            second = beta2 * second + (1 - beta2) * gradient**2
            unbiased = second / (1 - beta2 ** (step + 1))
        moved = RATE * momentum / (1 - beta1 ** (step + 1)) / (unbiased.sqrt() + EPS)
        value = value * (1 - RATE * DECAY) - torch.where(second > 0, moved, 0.0)
    torch.testing.assert_close(found.detach().double(), value, rtol=1e-5, atol=1e-6)


def test_it_can_go_on_as_adamw() -> None:
    """The stored second moment has grown with its bias correction, so that sizes of steps do not jump."""
    parameter, optimizer = trained()
    state, beta2 = optimizer.state[parameter], BETAS[1]
    second = torch.zeros(3, 4)
    for gradient in gradients()[:FROM]:
        second = beta2 * second + (1 - beta2) * gradient**2
    unbiased = state["exp_avg_sq"] / (1 - beta2 ** float(state["step"]))
    torch.testing.assert_close(unbiased, second / (1 - beta2**FROM), rtol=1e-4, atol=0)


def test_a_parameter_that_has_had_no_gradient_stays() -> None:
    """Such as that of an expert that no token went to."""
    parameter, optimizer = made(OneBitAdamW)
    assert isinstance(optimizer, OneBitAdamW)
    optimizer.frozen, before = True, parameter.detach().clone()
    parameter.grad = optimizer.momentum(parameter, torch.ones(3, 4))
    optimizer.step()
    assert torch.equal(parameter, before)
