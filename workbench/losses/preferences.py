"""Losses of judged answers: of pairs in which one is preferred, and of single answers that are good or bad.

Each is a pure function of numbers for each pair or answer, which says nothing of how they are averaged. A log-ratio is
log p(answer | prompt) of the model that trains minus that of the reference, in nats. What depends on the prompt alone
cancels in the difference of two log-ratios.

Legend: B pairs or answers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def dpo(difference_B: Tensor, *, beta: Tensor | float, margin_B: Tensor | float = 0.0) -> Tensor:
    """-log sigmoid(beta * difference - margin), of each pair (Rafailov et al. 2023, arXiv:2305.18290, eq. 7).

    Args:
        difference_B: Log-ratio of the chosen answer minus that of the rejected one.
        beta: Scale of rewards, > 0: a reward is beta times a log-ratio.
        margin_B: By how much the reward of the chosen answer is to be higher: the offset of ODPO (Amini et al. 2024,
            arXiv:2402.10571).
    """
    return -F.logsigmoid(beta * difference_B - margin_B)


def ipo(difference_B: Tensor, *, beta: Tensor | float) -> Tensor:
    """(difference - 1 / (2 beta))^2, of each pair (Azar et al. 2023, arXiv:2310.12036, eq. 17).

    Args:
        difference_B: As for `dpo`.
        beta: The paper's tau, > 0.
    """
    return (difference_B - 1 / (2 * beta)) ** 2


def hinge(difference_B: Tensor, *, beta: Tensor | float, margin_B: Tensor | float = 0.0) -> Tensor:
    """max(0, 1 + margin - beta * difference), of each pair.

    The calibration loss of SLiC-HF (Zhao et al. 2023, arXiv:2305.10425), of log-ratios as Liu et al. 2023
    (arXiv:2309.06657) write it. Arguments as of `dpo`.
    """
    return F.relu(1 + margin_B - beta * difference_B)


def conservative(difference_B: Tensor, *, beta: Tensor | float, smoothing: float) -> Tensor:
    """-(1 - e) log sigmoid(beta * difference) - e log sigmoid(-beta * difference), of each pair: cDPO.

    Mitchell 2023, "A note on DPO with noisy preferences". It has its minimum at a finite difference.

    Args:
        difference_B: As for `dpo`.
        smoothing: e, the share of pairs that are taken to be judged the wrong way round, 0 <= e < 0.5.
    """
    scaled_B = beta * difference_B
    return -(1 - smoothing) * F.logsigmoid(scaled_B) - smoothing * F.logsigmoid(-scaled_B)


def robust(difference_B: Tensor, *, beta: Tensor | float, smoothing: float) -> Tensor:
    """(-(1 - e) log sigmoid(beta * difference) + e log sigmoid(-beta * difference)) / (1 - 2 e), of each pair.

    Its mean over flips of a share e is the loss of `dpo` (Chowdhury et al. 2024, arXiv:2403.00409). Arguments
    as of `conservative`. It may be below 0.
    """
    scaled_B = beta * difference_B
    return (smoothing * F.logsigmoid(-scaled_B) - (1 - smoothing) * F.logsigmoid(scaled_B)) / (1 - 2 * smoothing)


def tie(difference_B: Tensor, *, beta: Tensor | float) -> Tensor:
    """-(log sigmoid(beta * difference) + log sigmoid(-beta * difference)) / 2, of pairs whose answers are equally good.

    The cross entropy with the target 1/2: `conservative` with e = 1/2, and the mean of `robust` over both orders.
    Arguments as of `dpo`.
    """
    scaled_B = beta * difference_B
    return -(F.logsigmoid(scaled_B) + F.logsigmoid(-scaled_B)) / 2


def kto(
    ratio_B: Tensor,
    desired_B: Tensor,
    baseline: Tensor | float,
    *,
    beta: Tensor | float,
    desirable: float = 1.0,
    undesirable: float = 1.0,
) -> Tensor:
    """lambda (1 - sigmoid(beta (ratio - z))) of a good answer, lambda (1 - sigmoid(beta (z - ratio))) of a bad one.

    Ethayarajh et al. 2024, arXiv:2402.01306, eq. 8.

    Args:
        ratio_B: Log-ratios of the answers.
        desired_B: Whether each is good, bool.
        baseline: z, an estimate of KL(model || reference); gets no gradient. See `kto_baseline`.
        desirable: lambda of good answers.
        undesirable: lambda of bad ones.
    """
    distance_B = ratio_B - baseline
    good_B = desirable * (1 - torch.sigmoid(beta * distance_B))
    return torch.where(desired_B, good_B, undesirable * (1 - torch.sigmoid(-beta * distance_B)))


def kto_baseline(mean_ratio: Tensor) -> Tensor:
    """z of `kto`: max(0, mean log-ratio of answers to other prompts), without a gradient."""
    return mean_ratio.detach().clamp_min(0)


def orpo(chosen_B: Tensor, rejected_B: Tensor) -> Tensor:
    """-log sigmoid(log odds(chosen) - log odds(rejected)), of each pair; needs no reference.

    odds = p / (1 - p) of p, the geometric mean of the probabilities of an answer's tokens (Hong et al. 2024,
    arXiv:2403.07691, eq. 7). The whole loss is the mean -log p of the chosen answer's tokens plus lambda times this.

    Args:
        chosen_B: Mean log-probability of the tokens of the chosen answer, < 0.
        rejected_B: The same of the rejected one.
    """
    return -F.logsigmoid(log_odds(chosen_B) - log_odds(rejected_B))


def log_odds(log_p_B: Tensor) -> Tensor:
    """log(p / (1 - p)) of a log-probability below 0, exact where p is close to 0 or to 1."""
    tiny = torch.finfo(log_p_B.dtype).tiny
    return log_p_B - torch.log((-torch.expm1(log_p_B)).clamp_min(tiny))


def simpo(chosen_B: Tensor, rejected_B: Tensor, *, beta: Tensor | float, gamma: float) -> Tensor:
    """-log sigmoid(beta * (chosen - rejected) - gamma), of each pair; needs no reference.

    Meng et al. 2024, arXiv:2405.14734, eq. 6.

    Args:
        chosen_B: Mean log-probability of the tokens of the chosen answer.
        rejected_B: The same of the rejected one.
        gamma: By how much the reward of the chosen answer is to be higher, >= 0.
    """
    return -F.logsigmoid(beta * (chosen_B - rejected_B) - gamma)


def cpo(chosen_B: Tensor, rejected_B: Tensor, *, beta: Tensor | float) -> Tensor:
    """-log sigmoid(beta * (chosen - rejected)), of each pair; needs no reference.

    Xu et al. 2024, arXiv:2401.08417, whose whole loss adds -log p of the chosen answer.

    Args:
        chosen_B: Log-probability of the chosen answer, the sum over its tokens.
        rejected_B: The same of the rejected one.
    """
    return -F.logsigmoid(beta * (chosen_B - rejected_B))


def token_factors(place_N: Tensor, shared_N: Tensor, *, alpha: float) -> Tensor:
    """Factor of each token's log-probability in length-desensitised DPO (LD-DPO).

    1 up to the length of the shorter answer of the pair, alpha from there on: log p' = log p(first tokens) + alpha log
    p(the others) (Liu et al. 2024, arXiv:2409.06411). alpha 1 is `dpo`; 0 compares as many tokens of both.

    Args:
        place_N: Place of the token among those of its answer, from 0.
        shared_N: Tokens of the shorter answer of its pair.
    """
    within_N = place_N < shared_N
    return torch.full_like(within_N, alpha, dtype=torch.float64).masked_fill_(within_N, 1.0)
