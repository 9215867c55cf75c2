"""1-bit Adam: once the second moment is known, momentum travels between devices in the place of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class OneBitAdamW(torch.optim.AdamW):
    """AdamW, whose second moment stays what it was from some step on (Tang et al. 2021, arXiv:2102.02888).

    While `frozen` is not set it is torch's, bit for bit. From then on the gradients that it finds are momenta, which
    devices have added up, and become its first moment; the step is lr m / (1 - b1^t) / (sqrt(v) + eps), with v the
    unbiased second moment of the last step before. A value whose v is zero, as it had no gradient until then, stays
    where it is: its step would be m / eps. The stored second moment grows as its bias correction does, so that a run
    may go on as AdamW.
    """

    frozen = False
    """Whether gradients are momenta in this step."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take the step."""
        if not self.frozen:
            return super().step(closure)
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                state = self.state.get(parameter)
                if parameter.grad is None or not state:
                    continue
                before, now = (1 - beta2 ** (state["step"].double() + more) for more in (0, 1))
                state["step"] += 1
                state["exp_avg_sq"] *= now / before
                state["exp_avg"].copy_(parameter.grad * known(state))
                size = (state["exp_avg_sq"] / now).sqrt_().add_(group["eps"])
                momentum = state["exp_avg"] / (1 - beta1 ** state["step"].double())
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(momentum / size, alpha=group["lr"])
        return None

    def momentum(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        """The first moment after a gradient, of the values that move."""
        state = self.state.get(parameter)
        if not state:
            return torch.zeros_like(gradient)
        return torch.lerp(gradient, state["exp_avg"], self.defaults["betas"][0]) * known(state)


def known(state: dict[str, Tensor]) -> Tensor:
    """Which values of a parameter have had a gradient."""
    return state["exp_avg_sq"] > 0
