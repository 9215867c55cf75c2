"""The loss of judged answers that a configuration asks for, from the log-probabilities of their tokens.

Legend: B answers (of a pair first the chosen and then the rejected one), L tokens of the longest, P examples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.config.sections.prefer_config import WITH_TIES, PreferConfig
from workbench.losses import preferences


class Answers(NamedTuple):
    """Log-probabilities of answers, in nats; float64, so that differences of long sums are exact."""

    counted_B: Tensor
    """As `prefer.length` and the loss count their tokens."""
    mean_B: Tensor
    """Mean over tokens."""


class Judged(NamedTuple):
    """Losses of examples, and rewards of answers, of which the better ones are to have more."""

    loss_P: Tensor
    reward_B: Tensor


def answers(log_p_BL: Tensor, tokens_B: Tensor, shared_B: Tensor, config: PreferConfig) -> Answers:
    """Log-probabilities of answers from those of their tokens.

    Args:
        log_p_BL: 0 behind the last token of an answer.
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
    factor_BL = preferences.token_factors(place_L, shared_B[:, None], alpha=config.ld_alpha)
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
        loss_P = preferences.kto(
            ratio_B,
            desired_B,
            baseline,
            beta=beta,
            desirable=config.desirable,
            undesirable=config.undesirable,
        )
        mean_P = torch.where(desired_B, model.mean_B, 0.0)
    else:
        loss_P = _of_pairs(ratio_B[::2], ratio_B[1::2], config, beta=beta, margin_P=margin_P)
        mean_P = model.mean_B[::2]
        if tie_P is not None:
            loss_P = torch.where(tie_P, _of_ties(ratio_B[::2], ratio_B[1::2], config, beta=beta), loss_P)
            mean_P = torch.where(tie_P, (mean_P + model.mean_B[1::2]) / 2, mean_P)
    if config.sft_factor:
        loss_P = loss_P - config.sft_factor * mean_P
    return Judged(loss_P, beta * ratio_B)


def _of_pairs(chosen_P: Tensor, rejected_P: Tensor, config: PreferConfig, *, beta: float, margin_P: Tensor) -> Tensor:
    """Losses of pairs, without what `prefer.alpha` adds."""
    difference_P = chosen_P - rejected_P
    gamma = beta / 2 if config.gamma is None else config.gamma
    losses: dict[str, Callable[[], Tensor]] = {
        "dpo": lambda: preferences.dpo(difference_P, beta=beta, margin_B=margin_P),
        "ipo": lambda: preferences.ipo(difference_P, beta=beta),
        "hinge": lambda: preferences.hinge(difference_P, beta=beta, margin_B=margin_P),
        "cdpo": lambda: preferences.conservative(difference_P, beta=beta, smoothing=config.smoothing),
        "robust": lambda: preferences.robust(difference_P, beta=beta, smoothing=config.smoothing),
        "orpo": lambda: beta * preferences.orpo(chosen_P, rejected_P),
        "simpo": lambda: preferences.simpo(chosen_P, rejected_P, beta=beta, gamma=gamma),
        "cpo": lambda: preferences.cpo(chosen_P, rejected_P, beta=beta),
    }
    return losses[config.loss]()


def _of_ties(first_P: Tensor, second_P: Tensor, config: PreferConfig, *, beta: float) -> Tensor:
    """Losses of pairs whose answers are equally good, without what `prefer.alpha` adds."""
    if config.loss == "ipo":
        return (first_P - second_P) ** 2
    if config.loss == "orpo":
        return beta * preferences.tie(preferences.log_odds(first_P) - preferences.log_odds(second_P), beta=1.0)
    assert config.loss in WITH_TIES, "other losses have no ties"
    return preferences.tie(first_P - second_P, beta=beta)
