"""Sophia-G: momentum divided by an estimate of the diagonal of the curvature, each value clipped (Liu et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.losses.drawn_labels import LabelDraws

LEAST = 1e-12
"""Least curvature that is divided by, as in the paper."""


class Sophia(torch.optim.Optimizer):
    """Sophia (arXiv:2305.14342, algorithm 3), with decoupled decay: theta <- theta - lr clip(m / max(gamma h, eps), 1).

    m averages the gradients by beta1 and h the estimates of curvature by beta2; neither is corrected for its start.
    Where no curvature was seen a value moves by `lr`, as far as any ever does.

    Args:
        gamma: Factor of the curvature; the larger, the fewer values are clipped.
        every: Steps from one estimate of the curvature to the next.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        *,
        lr: float,
        gamma: float,
        every: int,
        betas: tuple[float, float] = (0.96, 0.99),
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas})
        self.gamma, self.every = gamma, every

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self._state_of(parameter)
                state["exp_avg"].lerp_(parameter.grad, 1 - group["betas"][0])
                least = (self.gamma * state["curvature"]).clamp_(min=LEAST)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_((state["exp_avg"] / least).clamp_(-1, 1), alpha=-group["lr"])

    @torch.no_grad()
    def observe(self, labels: float) -> None:
        """Take in the gradients that the parameters have now as those of drawn labels.

        Args:
            labels: How many their mean is over: the estimate is labels * gradient^2 (Gauss-Newton-Bartlett).
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    estimate = parameter.grad.square().mul_(labels)
                    self._state_of(parameter)["curvature"].lerp_(estimate, 1 - group["betas"][1])

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state |= {"exp_avg": torch.zeros_like(parameter), "curvature": torch.zeros_like(parameter)}
        return state


def see_curvature(
    optimizer: torch.optim.Optimizer, step: int, again: Callable[[], object], draws: LabelDraws | None, labels: float
) -> None:
    """Show Sophia the gradients of drawn labels in the steps where they are due; the plain ones are there again after.

    Args:
        step: From 0; the first is one of them.
        again: Adds the gradients of the same rows to those of the parameters.
        draws: Of the loss; None where it cannot draw, which the configuration's checks have refused.
        labels: Of the step.
    """
    if not isinstance(optimizer, Sophia) or step % optimizer.every:
        return
    assert draws is not None
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    plain = [each.grad for each in parameters]
    for each in parameters:
        each.grad = None
    with draws.drawing():
        again()
    optimizer.observe(labels)
    for each, gradient in zip(parameters, plain, strict=True):
        each.grad = gradient
