"""Adam-mini: AdamW with one second moment for each row of a matrix, which halves the optimizer's state.

Not pytorch-optimizer's: it takes a whole model and goes by the names of its parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class AdamMini(torch.optim.Optimizer):
    """Adam-mini (Zhang et al. 2024, arXiv:2406.16793, algorithms 1 and 3), with decoupled decay.

    v_b <- beta2 v_b + (1 - beta2) mean(g_b^2) for each block b of a parameter. The rows of a matrix are its blocks: the
    output neurons of a layer, the tokens of embeddings and of a head that predicts them; other parameters are one block
    each. The paper takes the rows of a head of queries or keys together; apart they cost a vector.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)

    def _move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        (first, second), state = group["betas"], self.state[parameter]
        squared = gradient.square()
        squared = (
            squared.mean(dim=tuple(range(1, gradient.ndim)), keepdim=True) if gradient.ndim > 1 else squared.mean()
        )
        if not state:
            state |= {"step": 0, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(squared)}
        state["step"] += 1
        state["exp_avg"].lerp_(gradient, 1 - first)
        state["exp_avg_sq"].lerp_(squared, 1 - second)
        root = (state["exp_avg_sq"] / (1 - second ** state["step"])).sqrt_().add_(group["eps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - first ** state["step"]))
