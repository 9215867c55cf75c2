"""Optimizers written here, and two additions to any optimizer: Lookahead, and sparse gradients with error feedback.

Why none is pytorch-optimizer's: its Adam-mini takes a whole model and goes by the names of parameters; its plain
Shampoo has no average and decomposes two matrices in every step; its scalable Shampoo and its GaLore keep their state
in objects that no checkpoint holds; its APOLLO returns the scaled projection instead of scaling the gradient; its
Lookahead keeps slow weights outside of the optimizer's state, where checkpoints, sharding and frozen layers do not
reach them.

Legend: O rows of a matrix, I columns; M its smaller side, N its larger side, R dimensions of a subspace.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from workbench.losses.label_losses import LabelDraws

State = dict[str, Any]
Betas = tuple[float, float]

LEAST_CURVATURE = 1e-12
"""Smallest curvature that Sophia divides by, as in the paper."""
GROWTH = 1.01
"""Largest factor from the norm of one of APOLLO's steps to the next (Zhu et al. 2024, section 4.2)."""
LEAST_NORM = 1e-8
"""Added to norms before a division."""
SLOW = "slow"
"""Key of Lookahead's slow weights in a parameter's optimizer state."""
FAST_STEPS = "fast_steps"
"""Key in an optimizer's group of its steps since the slow weights moved."""
WAITING = "waiting"
"""Key in a parameter's optimizer state of the part of its gradients that was not applied yet."""


class OwnOptimizer(torch.optim.Optimizer):
    """Moves each parameter that has a gradient by `move`; weight decay is decoupled."""

    def __init__(
        self, groups: Sequence[dict[str, Any]], *, lr: float, betas: Betas = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take one step."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    self.move(parameter, parameter.grad, self.state[parameter], group)

    @abstractmethod
    def move(self, parameter: nn.Parameter, gradient: Tensor, state: State, group: dict[str, Any]) -> None:
        """Update the state with this gradient, and the parameter."""


class AdamMini(OwnOptimizer):
    """Adam-mini (Zhang et al. 2024, arXiv:2406.16793, algorithms 1 and 3): half the optimizer state of AdamW.

    v_b <- beta2 v_b + (1 - beta2) mean(g_b^2) for each block b of a parameter. The rows of a matrix are its blocks: the
    output neurons of a layer, the tokens of embeddings and of a head that predicts them; any other parameter is one
    block. The paper makes one block of the rows of a head of queries or keys; separate blocks cost a vector.
    """

    def move(self, parameter: nn.Parameter, gradient: Tensor, state: State, group: dict[str, Any]) -> None:
        (first, second), squared = group["betas"], gradient.square()
        dimensions = tuple(range(1, gradient.ndim))
        squared = squared.mean(dim=dimensions, keepdim=True) if dimensions else squared.mean()
        if not state:
            state |= {"step": 0, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(squared)}
        state["step"] += 1
        state["exp_avg"].lerp_(gradient, 1 - first)
        state["exp_avg_sq"].lerp_(squared, 1 - second)
        root = (state["exp_avg_sq"] / (1 - second ** state["step"])).sqrt_().add_(group["eps"])
        parameter.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - first ** state["step"]))


class Sophia(OwnOptimizer):
    """Sophia-G (Liu et al. 2024, arXiv:2305.14342, algorithm 3): theta <- theta - lr clip(m / max(gamma h, eps), 1).

    m averages the gradients by beta1, h the estimates of the curvature's diagonal by beta2; neither is corrected for
    its start. A value whose curvature was never seen moves by `lr`, which is as far as any value ever moves.

    Args:
        gamma: Factor of the curvature; a larger one clips fewer values.
        every: Steps between estimates of the curvature.
    """

    def __init__(
        self, groups: Sequence[dict[str, Any]], *, lr: float, gamma: float, every: int, betas: Betas = (0.96, 0.99)
    ) -> None:
        super().__init__(groups, lr=lr, betas=betas)
        self.gamma, self.every = gamma, every

    def move(self, parameter: nn.Parameter, gradient: Tensor, state: State, group: dict[str, Any]) -> None:
        self._begin(parameter)
        state["exp_avg"].lerp_(gradient, 1 - group["betas"][0])
        least = (self.gamma * state["curvature"]).clamp_(min=LEAST_CURVATURE)
        parameter.add_((state["exp_avg"] / least).clamp_(-1, 1), alpha=-group["lr"])

    @torch.no_grad()
    def observe(self, labels: float) -> None:
        """Update the curvature with the present gradients, which are those of sampled labels.

        Args:
            labels: Number of labels in the mean: the estimate is labels * gradient^2 (Gauss-Newton-Bartlett).
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._begin(parameter)
                    estimate = parameter.grad.square().mul_(labels)
                    self.state[parameter]["curvature"].lerp_(estimate, 1 - group["betas"][1])

    def _begin(self, parameter: nn.Parameter) -> None:
        if not (state := self.state[parameter]):
            state |= {"exp_avg": torch.zeros_like(parameter), "curvature": torch.zeros_like(parameter)}


def see_curvature(
    optimizer: torch.optim.Optimizer, step: int, again: Callable[[], object], draws: LabelDraws | None, labels: float
) -> None:
    """Show Sophia the gradients of sampled labels in the steps where they are due, and restore the plain gradients.

    Args:
        step: From 0, which is a due one.
        again: Adds the gradients of the same rows to those of the parameters.
        draws: Sampler of labels of the loss; None where it has none, which the configuration's checks have refused.
        labels: Number of labels in the step.
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


class Shampoo(OwnOptimizer):
    """Shampoo (Gupta et al. 2018, arXiv:1802.09568, algorithm 1) with grafting (Anil et al. 2020, Shi et al. 2023).

    L <- beta2 L + (1 - beta2) G G', R alike with G' G; the direction L^(-1/4) M R^(-1/4) of the momentum M gets the
    length of Adam's step.

    Args:
        groups: Of matrices only.
        every: Steps between computations of a matrix's roots; the first is in its first step.
        eps: Added to Adam's root, and to the eigenvalues in units of the largest.
    """

    def __init__(
        self, groups: Sequence[dict[str, Any]], *, lr: float, every: int, betas: Betas = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps)
        self.every = every

    def move(self, parameter: nn.Parameter, gradient: Tensor, state: State, group: dict[str, Any]) -> None:
        gradient_OI, (first, second), eps = gradient, group["betas"], group["eps"]
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
            statistics = state[name] / (1 - second ** state["step"])
            values, vectors = torch.linalg.eigh(statistics.double())
            largest = values[-1].clamp(min=0)
            powers = (values.clamp(min=0) + eps * largest).pow(-0.25)
            powers = torch.where(largest > 0, powers, torch.zeros_like(powers))
            root: Tensor = ((vectors * powers) @ vectors.T).to(statistics)
            state[f"{name}_root"].copy_(root)
        root_OI = (state["exp_avg_sq"] / (1 - second ** state["step"])).sqrt_().add_(eps)
        adam_OI: Tensor = state["exp_avg"] / (1 - first ** state["step"]) / root_OI
        direction_OI: Tensor = state["left_root"] @ state["exp_avg"] @ state["right_root"]
        length = torch.linalg.vector_norm(direction_OI)
        scale = torch.where(length > 0, torch.linalg.vector_norm(adam_OI) / length, 0.0)
        parameter.add_(direction_OI * scale, alpha=-group["lr"])


class SubspaceAdam(OwnOptimizer):
    """Adam for whole matrices whose moments see a projection of each gradient to few dimensions.

    A matrix is transposed where it is higher than wide, so that its smaller side is projected.

    Args:
        groups: Of matrices only.
        rank: Dimensions of the subspace, R; at most those of the matrix.
        every: Steps of a matrix between changes of its subspace. The moments carry over, as in both papers.
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
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps)
        self.rank, self.every, self.scale, self.seed = rank, every, scale, seed
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        self.number: dict[nn.Parameter, int] = {parameter: number for number, parameter in enumerate(parameters)}

    def move(self, parameter: nn.Parameter, gradient: Tensor, state: State, group: dict[str, Any]) -> None:
        state.setdefault("step", 0)
        high = parameter.shape[0] > parameter.shape[1]
        move_MN = self.direction(gradient.T if high else gradient, state, group, number=self.number[parameter])
        parameter.add_(move_MN.T if high else move_MN, alpha=-group["lr"])

    @abstractmethod
    def direction(self, gradient_MN: Tensor, state: State, group: dict[str, Any], *, number: int) -> Tensor:
        """The step of a matrix (M, N) at learning rate 1; updates its state.

        Args:
            number: Of the matrix.
        """

    def _adam(self, projected_RN: Tensor, state: State, group: dict[str, Any]) -> Tensor:
        """Adam's step in the subspace (R, N); updates the moments."""
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


class GaLore(SubspaceAdam):
    """GaLore (Zhao et al. 2024, arXiv:2403.03507, algorithm 2): the subspace of a gradient's largest singular values.

    W <- W - lr alpha P Adam(P' G), where P (M, R) are the first left singular vectors of the gradient at the time that
    the subspace is chosen. Where R is M it is Adam in rotated coordinates.
    """

    def direction(self, gradient_MN: Tensor, state: State, group: dict[str, Any], *, number: int) -> Tensor:
        """P Adam(P' G), times alpha."""
        if state["step"] % self.every == 0:
            left_MM, _, _ = torch.linalg.svd(gradient_MN, full_matrices=False)
            rank = min(self.rank, len(gradient_MN))
            state["basis"] = left_MM[:, :rank].clone(memory_format=torch.contiguous_format)
        basis_MR: Tensor = state["basis"]
        return (basis_MR @ self._adam(basis_MR.T @ gradient_MN, state, group)).mul_(self.scale)


class Apollo(SubspaceAdam):
    """APOLLO (Zhu et al. 2024, arXiv:2412.05270, algorithm 1): the gradient, each column scaled as Adam would scale it.

    W <- W - lr alpha G diag(s), where column j of the larger side is scaled by s_j = |Adam(P G)_j| / |(P G)_j|. P, of
    shape (R, M), is sampled from N(0, 1 / R), anew wherever it is used, so that only its seed is kept: a function of
    the run's seed, the matrix and the steps done. The norm of a matrix's step grows at most by GROWTH from one step to
    the next.
    """

    def direction(self, gradient_MN: Tensor, state: State, group: dict[str, Any], *, number: int) -> Tensor:
        """G diag(s), with its growth limited, times alpha."""
        seed = int(np.random.SeedSequence([self.seed, number, state["step"] // self.every]).generate_state(1)[0])
        rank = min(self.rank, len(gradient_MN))
        # On the CPU, so that the numbers are the same on every device.
        drawn_RM = torch.randn(rank, len(gradient_MN), generator=torch.Generator().manual_seed(seed))
        chance_RM = (drawn_RM / math.sqrt(rank)).to(gradient_MN)
        projected_RN = chance_RM @ gradient_MN
        scaled_MN: Tensor = gradient_MN * self.scaling(self._adam(projected_RN, state, group), projected_RN)
        last, norm = state.get("last_norm"), torch.linalg.vector_norm(scaled_MN)
        if last is not None:
            excess = (norm / (last + LEAST_NORM)).clamp(min=GROWTH) / GROWTH
            scaled_MN, norm = scaled_MN / excess, norm / excess
        state["last_norm"] = norm
        return scaled_MN.mul_(self.scale)

    def scaling(self, moved_RN: Tensor, projected_RN: Tensor) -> Tensor:
        """Factor of each column (N)."""
        moved_N: Tensor = torch.linalg.vector_norm(moved_RN, dim=0)
        norm_N: Tensor = torch.linalg.vector_norm(projected_RN, dim=0)
        return moved_N / (norm_N + LEAST_NORM)


class ApolloMini(Apollo):
    """APOLLO-Mini (section 4.3): one dimension and one factor for the whole matrix; its state is a vector, as SGD's."""

    def scaling(self, moved_RN: Tensor, projected_RN: Tensor) -> Tensor:
        """One factor."""
        moved: Tensor = torch.linalg.vector_norm(moved_RN)
        norm: Tensor = torch.linalg.vector_norm(projected_RN)
        return moved / (norm + LEAST_NORM)


def look_ahead(optimizer: torch.optim.Optimizer, *, every: int, alpha: float) -> None:
    """Give the parameters of an optimizer slow weights, which start equal to them (Zhang et al. 2019, algorithm 1).

    After every `every` steps of a group the slow weights go the share `alpha` of the way to the fast ones, which then
    restart from there. Slow weights live in the optimizer's state, which is saved, evicted and loaded. A parameter
    without a gradient is left alone.
    """
    starts: dict[nn.Parameter, Tensor] = {}

    def before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and SLOW not in optimizer.state.get(parameter, {}):
                    starts[parameter] = parameter.detach().clone()

    @torch.no_grad()
    def after(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for parameter, start in starts.items():
            optimizer.state[parameter][SLOW] = start
        starts.clear()
        for group in optimizer.param_groups:
            group[FAST_STEPS] = (group.get(FAST_STEPS, 0) + 1) % every
            for parameter in () if group[FAST_STEPS] else group["params"]:
                if parameter.grad is not None:
                    slow = optimizer.state[parameter][SLOW]
                    slow.lerp_(parameter, alpha)
                    parameter.copy_(slow)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def apply_largest(optimizer: torch.optim.Optimizer, *, share: float) -> None:
    """Let an optimizer see only the largest values of its gradients (Stich et al. 2018, arXiv:1809.07599, MEM-SGD).

    With the clipped gradients g of all parameters as one vector and the residual e, which starts at zero, the optimizer
    sees the `share` of g + e whose values are largest, ties with the smallest of them included; the rest is the next e.
    So the sum of all that it saw, and e, is the sum of all gradients; with a share of 1 nothing changes. The residual
    lives in the optimizer's state, which is saved, evicted and loaded. A parameter without a gradient is left alone.

    The gradient is that of the whole batch, summed over processes: unlike a communication hook, as which the method was
    invented, the result does not depend on the number of processes or on micro-batches.
    """
    waiting: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
        for parameter, gradient in gradients.items():
            if WAITING in optimizer.state.get(parameter, {}):
                # Out of the state: an optimizer starts where it finds none.
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
    """Size of the smallest of the largest `share` of all values; at least one value counts."""
    if not gradients:
        return torch.zeros(())
    sizes_N = torch.cat([gradient.abs().flatten().to(gradients[0].device) for gradient in gradients])
    count = max(1, round(share * len(sizes_N)))
    return torch.kthvalue(sizes_N, len(sizes_N) - count + 1).values
