"""Losses of preference pairs and of single good or bad answers, and the one that a configuration asks for.

Each loss is a pure function of numbers per pair or answer, and leaves the averaging to the caller. A log-ratio is
log p(answer | prompt) of the trained model minus that of the reference, in nats. What depends on the prompt alone
cancels in the difference of two log-ratios.

Legend: B pairs or answers (where answers of pairs come as one list, first the chosen and then the rejected one), L
tokens of the longest, P examples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.config.sections.prefer_config import WITH_TIES, PreferConfig


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
    """(difference - 1 / (2 beta))^2, of each pair (Azar et al. 2023, arXiv:2310.12036, eq. 17). `difference_B`: as for
    `dpo`. `beta`: the paper's tau, > 0."""
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


class Answers(NamedTuple):
    """Log-probabilities of answers, in nats; float64, so that differences of long sums are exact."""

    counted_B: Tensor  # as `prefer.length` and the loss count their tokens
    mean_B: Tensor  # mean over tokens


class Judged(NamedTuple):
    """Losses of examples, and rewards of answers, which should be higher for better answers."""

    loss_P: Tensor
    reward_B: Tensor


def answers(log_p_BL: Tensor, tokens_B: Tensor, shared_B: Tensor, config: PreferConfig) -> Answers:
    """Log-probabilities of answers from those of their tokens.

    Args:
        log_p_BL: 0 after the last token of an answer.
        tokens_B: Tokens of each.
        shared_B: Tokens of the shorter answer of its pair.
    """
    log_p_BL = log_p_BL.double()
    sum_B = log_p_BL.sum(1)
    mean_B = sum_B / tokens_B
    if config.averages:
        return Answers(mean_B, mean_B)
    if config.length != "desensitised":
        return Answers(sum_B, mean_B)
    place_L = torch.arange(log_p_BL.shape[1], device=log_p_BL.device)
    factor_BL = token_factors(place_L, shared_B[:, None], alpha=config.ld_alpha)
    return Answers((log_p_BL * factor_BL).sum(1), mean_B)


def judge(
    model: Answers,
    reference_B: Tensor | None,
    config: PreferConfig,
    *,
    beta: float,
    desired_B: Tensor,
    margin_P: Tensor,
    baseline: Tensor | float = 0.0,
    tie_P: Tensor | None = None,
) -> Judged:
    """Losses and rewards.

    Of a tie, cross entropies have the target 1/2. ipo regresses h = difference on (p - 1/2) / tau with p the preference
    (Azar et al. 2023, arXiv:2310.12036, section 5), which is 0: difference^2. What `prefer.alpha` adds is the mean over
    both answers, so that the loss is the same whichever stands first.

    Args:
        reference_B: The reference's log-probabilities, counted alike; None where the loss compares with none.
        desired_B: Of single answers, whether each is good, bool; read by kto.
        margin_P: See `preferences.dpo`.
        baseline: See `preferences.kto`.
        tie_P: Which pairs are ties, bool, with a loss of `prefer_config.WITH_TIES`; None: none is.
    """
    counted_B = model.counted_B
    ratio_B = counted_B if reference_B is None else counted_B - reference_B
    if config.loss == "kto":
        loss_P = kto(
            ratio_B,
            desired_B,
            baseline,
            beta=beta,
            desirable=config.desirable,
            undesirable=config.undesirable,
        )
        mean_P = torch.where(desired_B, model.mean_B, 0.0)
    else:
        chosen_P = ratio_B[::2]
        rejected_P = ratio_B[1::2]
        difference_P = chosen_P - rejected_P
        gamma = beta / 2 if config.gamma is None else config.gamma
        losses: dict[str, Callable[[], Tensor]] = {
            "dpo": lambda: dpo(difference_P, beta=beta, margin_B=margin_P),
            "ipo": lambda: ipo(difference_P, beta=beta),
            "hinge": lambda: hinge(difference_P, beta=beta, margin_B=margin_P),
            "cdpo": lambda: conservative(difference_P, beta=beta, smoothing=config.smoothing),
            "robust": lambda: robust(difference_P, beta=beta, smoothing=config.smoothing),
            "orpo": lambda: beta * orpo(chosen_P, rejected_P),
            "simpo": lambda: simpo(chosen_P, rejected_P, beta=beta, gamma=gamma),
            "cpo": lambda: cpo(chosen_P, rejected_P, beta=beta),
        }
        loss_P = losses[config.loss]()
        mean_P = model.mean_B[::2]
        if tie_P is not None:
            loss_P = torch.where(tie_P, _of_ties(ratio_B[::2], ratio_B[1::2], config, beta=beta), loss_P)
            mean_P = torch.where(tie_P, (mean_P + model.mean_B[1::2]) / 2, mean_P)
    if config.sft_factor:
        loss_P = loss_P - config.sft_factor * mean_P
    return Judged(loss_P, beta * ratio_B)


def _of_ties(first_P: Tensor, second_P: Tensor, config: PreferConfig, *, beta: float) -> Tensor:
    """Losses of pairs whose answers are equally good, without what `prefer.alpha` adds."""
    if config.loss == "ipo":
        return (first_P - second_P) ** 2
    if config.loss == "orpo":
        return beta * tie(log_odds(first_P) - log_odds(second_P), beta=1.0)
    assert config.loss in WITH_TIES, "other losses have no ties"
    return tie(first_P - second_P, beta=beta)
