"""Shampoo for matrices, in the form that trains at scale: averaged statistics, roots now and then, Adam's lengths.

Not pytorch-optimizer's: its plain one has no average and takes two decompositions a matrix in every step, and its
scalable one keeps preconditioners in objects that no checkpoint holds.

Legend: O rows of a matrix, I columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

State = dict[str, Any]


class Shampoo(torch.optim.Optimizer):
    """Shampoo (Gupta et al. 2018, arXiv:1802.09568, algorithm 1) with grafting (Anil et al. 2020, Shi et al. 2023).

    L <- beta2 L + (1 - beta2) G G', R alike with G' G; the direction L^(-1/4) M R^(-1/4) of the momentum M gets the
    length of Adam's step. Decay is decoupled.

    Args:
        groups: Of matrices alone.
        every: Steps of a matrix from one computation of its roots to the next; the first is in its first step.
        eps: Added to Adam's root, and to the eigenvalues in units of the largest.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        *,
        lr: float,
        every: int,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self.every = every

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move every matrix that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    move_OI = self._move(parameter.grad, self.state[parameter], group)
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(move_OI, alpha=-group["lr"])

    def _move(self, gradient_OI: Tensor, state: State, group: dict[str, Any]) -> Tensor:
        """The step of a matrix at learning rate 1 (O, I); its state moves on."""
        (first, second), eps = group["betas"], group["eps"]
        if not state:
            rows, columns = gradient_OI.shape
            state |= {"step": 0, "exp_avg": torch.zeros_like(gradient_OI), "exp_avg_sq": torch.zeros_like(gradient_OI)}
            for name, size in (("left", rows), ("right", columns)):
                state |= {name: gradient_OI.new_zeros(size, size), f"{name}_root": gradient_OI.new_zeros(size, size)}
        due = state["step"] % self.every == 0
        state["step"] += 1
        state["exp_avg"].lerp_(gradient_OI, 1 - first)
        state["exp_avg_sq"].lerp_(gradient_OI.square(), 1 - second)
        state["left"].lerp_(gradient_OI @ gradient_OI.T, 1 - second)
        state["right"].lerp_(gradient_OI.T @ gradient_OI, 1 - second)
        for name in ("left", "right") if due else ():
            state[f"{name}_root"].copy_(inverse_fourth_root(state[name] / (1 - second ** state["step"]), eps=eps))
        root_OI = (state["exp_avg_sq"] / (1 - second ** state["step"])).sqrt_().add_(eps)
        adam_OI: Tensor = state["exp_avg"] / (1 - first ** state["step"]) / root_OI
        direction_OI: Tensor = state["left_root"] @ state["exp_avg"] @ state["right_root"]
        length = torch.linalg.vector_norm(direction_OI)
        return direction_OI * torch.where(length > 0, torch.linalg.vector_norm(adam_OI) / length, 0.0)


def inverse_fourth_root(statistics: Tensor, *, eps: float) -> Tensor:
    """(S + eps max(S) I)^(-1/4) of a symmetric, positive semidefinite S; zeros of zeros."""
    values, vectors = torch.linalg.eigh(statistics.double())
    largest = values[-1].clamp(min=0)
    powers = (values.clamp(min=0) + eps * largest).pow(-0.25)
    powers = torch.where(largest > 0, powers, torch.zeros_like(powers))
    root: Tensor = ((vectors * powers) @ vectors.T).to(statistics)
    return root
