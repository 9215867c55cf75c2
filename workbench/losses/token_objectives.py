"""Losses of one's own loop, from the log-probabilities of a row's target tokens: sums over tokens, never means.

Names, inputs and defaults are those of the Tinker interface, so that a loop moves between the two. What divides a sum,
such as a number of tokens, belongs into `weights` or `advantages`.

Legend: T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.losses.policy_losses import clipped

Inputs = Mapping[str, Tensor]
Numbers = Mapping[str, float]


@dataclass(frozen=True)
class TokenObjective:
    """A loss of a row.

    Args:
        needs: Names of the inputs (T,) that it reads besides `target_tokens`.
        settings: Its numbers with their defaults.
        loss: From log-probabilities (T,) in nats, inputs and settings to the summed loss, a scalar with a graph.
    """

    needs: tuple[str, ...]
    settings: Numbers
    loss: Callable[[Tensor, Inputs, Numbers], Tensor]


def cross_entropy(log_p: Tensor, inputs: Inputs, _: Numbers) -> Tensor:
    """-sum(weight log p); weights (T,) are 1 where none are given, and may be negative."""
    return -(log_p * inputs["weights"] if "weights" in inputs else log_p).sum()


def importance_sampling(log_p: Tensor, inputs: Inputs, _: Numbers) -> Tensor:
    """-sum(p / q A), with log q the log-probabilities by which the tokens were sampled: REINFORCE, off-policy."""
    return -((log_p - inputs["logprobs"]).exp() * inputs["advantages"]).sum()


def ppo(log_p: Tensor, inputs: Inputs, settings: Numbers) -> Tensor:
    """-sum(min(r A, clip(r, low, high) A)), r = p / q (Schulman et al. 2017, arXiv:1707.06347, eq. 7)."""
    low, high = 1 - settings["clip_low_threshold"], settings["clip_high_threshold"] - 1
    return clipped(log_p - inputs["logprobs"], inputs["advantages"], low=low, high=high).loss.sum()


def cispo(log_p: Tensor, inputs: Inputs, settings: Numbers) -> Tensor:
    """-sum(clip(r, low, high) A log p), r = p / q without a gradient (MiniMax 2025, arXiv:2506.13585, eq. 4)."""
    ratio = (log_p.detach() - inputs["logprobs"]).exp()
    bounded = ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])
    return -(bounded * inputs["advantages"] * log_p).sum()


def dro(log_p: Tensor, inputs: Inputs, settings: Numbers) -> Tensor:
    """-sum(A log p - beta / 2 (log p - log q)^2) (Richemond et al. 2024, arXiv:2405.19107)."""
    distance = (log_p - inputs["logprobs"]).square()
    return -(log_p * inputs["advantages"] - settings["beta"] / 2 * distance).sum()


_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_SAMPLED = ("logprobs", "advantages")
OBJECTIVES = {
    "cross_entropy": TokenObjective((), {}, cross_entropy),
    "importance_sampling": TokenObjective(_SAMPLED, {}, importance_sampling),
    "ppo": TokenObjective(_SAMPLED, _CLIP, ppo),
    "cispo": TokenObjective(_SAMPLED, _CLIP, cispo),
    "dro": TokenObjective(_SAMPLED, {"beta": 0.05}, dro),
}
"""By name."""
OPTIONAL = ("weights",)
"""Inputs that may be left out."""
FLOATS = frozenset({"weights", *_SAMPLED})
"""Inputs that hold numbers (T,), float32; `target_tokens` hold ids, int64."""


def surrogate(loss: Tensor, log_p: list[Tensor]) -> list[Tensor]:
    """Weights with which `cross_entropy` has the gradient of a scalar loss of log-probabilities that require one."""
    grads = torch.autograd.grad(loss, log_p, allow_unused=True)
    return [torch.zeros_like(each) if grad is None else -grad for each, grad in zip(log_p, grads, strict=True)]
