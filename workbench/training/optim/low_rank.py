"""Adam for whole matrices with moments in a subspace of few dimensions: GaLore and APOLLO.

Not pytorch-optimizer's: its projectors are objects that no checkpoint holds, its random ones depend on what was drawn
before, and its APOLLO gives the scaled projection back instead of scaling the gradient itself.

A matrix is looked at so that it is at least as wide as high, and its smaller side is projected.

Legend: M smaller side of a matrix, N larger side, R dimensions of the subspace.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

GROWTH = 1.01
"""Most by which APOLLO's steps of a matrix grow from one to the next (Zhu et al. 2024, section 4.2)."""
LEAST = 1e-8
"""Added to norms that are divided by."""

State = dict[str, Any]


class SubspaceAdam(torch.optim.Optimizer):
    """Adam whose moments see a projection of each gradient; decay is decoupled.

    Args:
        groups: Of matrices alone.
        rank: Dimensions of the subspace, R; no more than a matrix has.
        every: Steps of a matrix after which it gets another subspace. Moments go on in it, as in both papers.
        scale: Factor of the steps, alpha.
        seed: Of random subspaces.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        *,
        lr: float,
        rank: int,
        every: int,
        scale: float,
        seed: int,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self.rank, self.every, self.scale, self.seed = rank, every, scale, seed
        every_one = (parameter for group in self.param_groups for parameter in group["params"])
        self.number: dict[nn.Parameter, int] = {parameter: number for number, parameter in enumerate(every_one)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move every matrix that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state.setdefault("step", 0)
                stands = parameter.shape[0] > parameter.shape[1]
                gradient_MN = parameter.grad.T if stands else parameter.grad
                move_MN = self.direction(gradient_MN, state, group, number=self.number[parameter])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(move_MN.T if stands else move_MN, alpha=-group["lr"])

    @abstractmethod
    def direction(self, gradient_MN: Tensor, state: State, group: dict[str, Any], *, number: int) -> Tensor:
        """The step of a matrix at learning rate 1 (M, N); its state moves on.

        Args:
            number: Of the matrix.
        """

    def _adam(self, projected_RN: Tensor, state: State, group: dict[str, Any]) -> Tensor:
        """Adam's step in the subspace (R, N), from moments that take it in."""
        if "exp_avg" not in state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(projected_RN), torch.zeros_like(projected_RN)
        state["step"] += 1
        (first, second), time = group["betas"], int(state["step"])
        mean_RN: Tensor = state["exp_avg"]
        square_RN: Tensor = state["exp_avg_sq"]
        mean_RN.lerp_(projected_RN, 1 - first)
        square_RN.mul_(second).addcmul_(projected_RN, projected_RN, value=1 - second)
        root_RN = (square_RN / (1 - second**time)).sqrt_().add_(group["eps"])
        moved_RN: Tensor = (mean_RN / (1 - first**time)).div_(root_RN)
        return moved_RN

    def _dimensions(self, gradient_MN: Tensor) -> int:
        return min(self.rank, len(gradient_MN))


class GaLore(SubspaceAdam):
    """GaLore (Zhao et al. 2024, arXiv:2403.03507, algorithm 2): the subspace of a gradient's largest singular values.

    W <- W - lr alpha P Adam(P' G), where P (M, R) are the first left singular vectors of the gradient at the time that
    the subspace is chosen. Where R is M it is Adam in rotated coordinates.
    """

    def direction(self, gradient_MN: Tensor, state: State, group: dict[str, Any], *, number: int) -> Tensor:
        """P Adam(P' G), times alpha."""
        if state["step"] % self.every == 0:
            left_MM, _, _ = torch.linalg.svd(gradient_MN, full_matrices=False)
            state["basis"] = left_MM[:, : self._dimensions(gradient_MN)].clone(memory_format=torch.contiguous_format)
        basis_MR: Tensor = state["basis"]
        return (basis_MR @ self._adam(basis_MR.T @ gradient_MN, state, group)).mul_(self.scale)


class Apollo(SubspaceAdam):
    """APOLLO (Zhu et al. 2024, arXiv:2412.05270, algorithm 1): the gradient, each column scaled as Adam would scale it.

    W <- W - lr alpha G diag(s), where column j of the larger side is scaled by s_j = |Adam(P G)_j| / |(P G)_j|. P, of
    shape (R, M), is drawn from N(0, 1 / R), anew where it is used, so that only its seed is kept: a function of the
    run's seed, the matrix and the steps done. The norm of a matrix' steps grows by GROWTH at most from one to the next.
    """

    def direction(self, gradient_MN: Tensor, state: State, group: dict[str, Any], *, number: int) -> Tensor:
        """G diag(s), with its growth limited, times alpha."""
        chance_RM = self._projection(gradient_MN, number=number, drawn=state["step"] // self.every)
        projected_RN = chance_RM @ gradient_MN
        scaled_MN: Tensor = gradient_MN * self.scaling(self._adam(projected_RN, state, group), projected_RN)
        last, norm = state.get("last_norm"), torch.linalg.vector_norm(scaled_MN)
        if last is not None:
            excess = (norm / (last + LEAST)).clamp(min=GROWTH) / GROWTH
            scaled_MN, norm = scaled_MN / excess, norm / excess
        state["last_norm"] = norm
        return scaled_MN.mul_(self.scale)

    def scaling(self, moved_RN: Tensor, projected_RN: Tensor) -> Tensor:
        """Factor of each column (N)."""
        moved_N: Tensor = torch.linalg.vector_norm(moved_RN, dim=0)
        norm_N: Tensor = torch.linalg.vector_norm(projected_RN, dim=0)
        return moved_N / (norm_N + LEAST)

    def _projection(self, gradient_MN: Tensor, *, number: int, drawn: int) -> Tensor:
        seed = int(np.random.SeedSequence([self.seed, number, drawn]).generate_state(1)[0])
        ranks = self._dimensions(gradient_MN)
        # On the CPU, so that the draws are the same on every device.
        drawn_RM = torch.randn(ranks, len(gradient_MN), generator=torch.Generator().manual_seed(seed))
        return (drawn_RM / math.sqrt(ranks)).to(gradient_MN)


class ApolloMini(Apollo):
    """APOLLO-Mini (section 4.3): one dimension, and one factor for the whole matrix; state of a vector, as SGD's."""

    def scaling(self, moved_RN: Tensor, projected_RN: Tensor) -> Tensor:
        """One factor."""
        moved: Tensor = torch.linalg.vector_norm(moved_RN)
        norm: Tensor = torch.linalg.vector_norm(projected_RN)
        return moved / (norm + LEAST)
