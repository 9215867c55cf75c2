"""Losses of classification, summed over rows and weighted by row, and the one that a configuration asks for.

Legend: B rows, C outputs (classes, or 1 for a number).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.config.sections.classes_config import ClassesConfig

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Outputs (B, C), targets (B, C) and weights (B,) to a scalar, summed over the rows."""
Objective = Callable[[Tensor, Tensor, float], Tensor]
"""Outputs (B, C), weights and targets (B, 1 + C) and a factor to the summed loss times that factor."""


def cross_entropy(logits_BC: Tensor, target_BC: Tensor, weight_B: Tensor, *, gamma: float = 0.0) -> Tensor:
    """Sum of weight * -sum_c target_c (1 - p_c)^gamma log p_c, in nats: focal loss, and cross-entropy at gamma = 0.

    `target` may be soft (smoothed, a teacher's, a pseudo-label's). Lin et al. 2017, arXiv:1708.02002, eq. 4.
    """
    log_p_BC = F.log_softmax(logits_BC.float(), dim=-1)
    terms_BC = target_BC * log_p_BC
    if gamma:
        terms_BC = terms_BC * _power(-torch.expm1(log_p_BC), gamma)
    return -(terms_BC.sum(-1) * weight_B).sum()


def binary_cross_entropy(logits_BC: Tensor, target_BC: Tensor, weight_B: Tensor, *, gamma: float = 0.0) -> Tensor:
    """Sum over rows and classes of weight * (1 - p_t)^gamma * -log p_t: each class is a binary label.

    p_t is sigmoid(logit) where the target is 1 and its complement where it is 0; a soft target mixes the two.
    """
    logits_BC = logits_BC.float()
    yes_BC, no_BC = F.logsigmoid(logits_BC), F.logsigmoid(-logits_BC)
    if gamma:
        yes_BC = yes_BC * _power((-logits_BC).sigmoid(), gamma)
        no_BC = no_BC * _power(logits_BC.sigmoid(), gamma)
    return -((target_BC * yes_BC + (1 - target_BC) * no_BC).sum(-1) * weight_B).sum()


def _power(share_BC: Tensor, gamma: float) -> Tensor:
    """share^gamma with gradient 0 where the share is 0, where it is infinite for gamma < 1 and would become NaN."""
    return share_BC.clamp_min(torch.finfo(share_BC.dtype).tiny) ** gamma


def squared_error(outputs_BC: Tensor, target_BC: Tensor, weight_B: Tensor) -> Tensor:
    """Sum over rows and outputs of weight * (output - target)^2."""
    return ((outputs_BC.float() - target_BC) ** 2).sum(-1).mul(weight_B).sum()


def smooth(target_BC: Tensor, share: float) -> Tensor:
    """Spread `share` of each row's mass over the C classes (Szegedy et al. 2016, arXiv:1512.00567, section 7)."""
    return target_BC * (1 - share) + share * target_BC.sum(-1, keepdim=True) / target_BC.shape[-1]


def logit_adjusted(logits_BC: Tensor, log_prior_C: Tensor, strength: float) -> Tensor:
    """Logits plus `strength` times the classes' log frequencies, while training only.

    The model then need not learn the frequencies, which would favour common classes (Menon et al. 2021,
    arXiv:2007.07314, eq. 10).
    """
    return logits_BC + strength * log_prior_C


def class_weights(counts_C: Tensor, *, scheme: str, beta: float = 0.999) -> Tensor:
    """Weight of each class (C,) float32, with mean 1 over the rows.

    Args:
        counts_C: Training rows of each class; none may be 0.
        scheme: "none", "balanced" (1 / count) or "effective": (1 - beta) / (1 - beta^count), which differs less
            between classes of many rows (Cui et al. 2019, arXiv:1901.05555, eq. 4).
        beta: Of "effective": 0 gives equal weights, and towards 1 the weights become those of "balanced".
    """
    counts_C = counts_C.double()
    assert bool((counts_C > 0).all())
    if scheme == "none":
        return torch.ones_like(counts_C).float()
    raw_C = 1 / counts_C if scheme == "balanced" else (1 - beta) / -torch.expm1(counts_C * torch.tensor(beta).log())
    return (raw_C * counts_C.sum() / (raw_C * counts_C).sum()).float()


def criterion(config: ClassesConfig, targets_NC: Tensor) -> Objective:
    """Training loss with smoothing and logit adjustment. `targets_NC`: targets of all training rows; logit adjustment
    needs the frequencies of the classes."""
    base: Loss = partial(cross_entropy, gamma=config.gamma)
    if config.kind == "number":
        base = squared_error
    elif config.kind == "several":
        base = partial(binary_cross_entropy, gamma=config.gamma)
    log_prior_C = (targets_NC.double().sum(0) / targets_NC.double().sum()).log().float()

    def objective(outputs_BC: Tensor, labels_B: Tensor, scale: float) -> Tensor:
        weight_B, target_BC = labels_B[:, 0], labels_B[:, 1:]
        if config.smoothing and config.kind == "several":  # each class is a binary label
            target_BC = torch.lerp(target_BC, torch.full_like(target_BC, 0.5), config.smoothing)
        elif config.smoothing:
            target_BC = smooth(target_BC, config.smoothing)
        if config.logit_adjustment:
            outputs_BC = logit_adjusted(outputs_BC.float(), log_prior_C.to(outputs_BC.device), config.logit_adjustment)
        return base(outputs_BC, target_BC, weight_B) * scale

    return objective
