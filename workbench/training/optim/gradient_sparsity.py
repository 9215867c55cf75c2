"""Sparse gradients with error feedback: a step applies the largest values of the gradient, the rest waits.

Not a communication hook, as which it was invented: the gradient is that of the whole batch, summed over processes, so
that what is applied depends on neither their number nor the micro-batches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WAITING = "waiting"
"""Where what a parameter's gradients have not applied yet stands in its optimizer's state."""


def apply_largest(optimizer: torch.optim.Optimizer, *, share: float) -> None:
    """Let an optimizer see the largest values of its gradients alone (Stich et al. 2018, arXiv:1809.07599, MEM-SGD).

    With the clipped gradients g of all parameters as one vector and the residual e, which begins at zero, the optimizer
    sees the `share` of g + e whose values are largest, those that are as large as the smallest of them included; what
    it does not see is the next e. So the sum of all that it saw, and e, is the sum of all gradients; where the share is
    1, e stays zero and nothing changes. The residual stands in the optimizer's state, so that it is saved, evicted and
    loaded with it. A parameter without a gradient is left alone.
    """
    waiting: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        gradients = {
            parameter: parameter.grad
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        }
        for parameter, gradient in gradients.items():
            if WAITING in optimizer.state.get(parameter, {}):
                # Out of the state: an optimizer begins where it finds none.
                gradient += optimizer.state[parameter].pop(WAITING)
        bound = smallest_of_largest(list(gradients.values()), share=share)
        for parameter, gradient in gradients.items():
            stays = gradient.abs() < bound.to(gradient.device)
            waiting[parameter] = gradient.where(stays, 0)
            gradient.masked_fill_(stays, 0)

    def after(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for parameter, rest in waiting.items():
            optimizer.state[parameter][WAITING] = rest
        waiting.clear()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def smallest_of_largest(gradients: list[Tensor], *, share: float) -> Tensor:
    """The size of the smallest value among the share of all values that are largest; one value at least."""
    if not gradients:
        return torch.zeros(())
    sizes_N = torch.cat([gradient.abs().flatten().to(gradients[0].device) for gradient in gradients])
    count = max(1, round(share * len(sizes_N)))
    return torch.kthvalue(sizes_N, len(sizes_N) - count + 1).values
