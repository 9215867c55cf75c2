"""Losses of sampled answers: advantages from rewards, clipped probability ratios, and a penalty of divergence.

A ratio is the probability of a token now divided by that when the answer was sampled. GRPO, Dr. GRPO, DAPO, GSPO and
CISPO differ in what they average, over how much, and in what happens to large ratios.

Legend: P prompts, G answers to each, B answers, L their tokens, padded, A actions: tokens, or 1, the whole answer.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.config.sections.reinforce_config import Beyond, Normalise

WHOLE = ("whole", "mean_ratio")
"""Where an answer is one action."""
EPSILON = 1e-4  # added to a standard deviation, as TRL does: rewards that hardly differ do not become large advantages


def group_advantages(reward_PG: Tensor, *, scaled: bool) -> Tensor:
    """Reward minus the mean of the answers to the same prompt (P, G), G > 1. `scaled`: divide by their standard
    deviation (with G - 1), as GRPO does (Shao et al. 2024, arXiv:2402.03300); Dr. GRPO (Liu et al. 2025,
    arXiv:2503.20783) does not: it makes prompts count more that are nearly always, or nearly never, answered well."""
    centred_PG = reward_PG - reward_PG.mean(1, keepdim=True)
    return centred_PG / (reward_PG.std(1, keepdim=True) + EPSILON) if scaled else centred_PG


def turn_advantages(reward_EK: Tensor, *, scaled: bool) -> Tensor:
    """Sum of the compared rewards of each turn and of those after it (E, K), of the episodes of one prompt.

    A reward is compared with the mean of all turns of all episodes, and, if `scaled`, divided by their standard
    deviation: process supervision of DeepSeekMath (Shao et al. 2024, arXiv:2402.03300, section 4.1.3).

    Args:
        reward_EK: Reward of each turn; NaN where an episode has none. Fewer than two episodes teach nothing.
    """
    mask_EK = ~reward_EK.isnan()
    if int(mask_EK.any(1).sum()) < 2:
        return torch.zeros_like(reward_EK)
    compared_EK = torch.zeros_like(reward_EK)
    compared_EK[mask_EK] = group_advantages(reward_EK[mask_EK][None], scaled=scaled)[0]
    return returns_to_come(compared_EK, mask_EK)


def gigpo_advantages(reward_EK: Tensor, state_EK: Tensor, *, discount: float, weight: float, scaled: bool) -> Tensor:
    """Advantage of each turn (E, K): of its episode among those to the prompt, plus that among turns in the same state.

    A + weight * A', where A compares sums of rewards of episodes, and A' compares, of all turns of all episodes that
    began in one state, the discounted rewards from there on; each is divided by its standard deviation if `scaled`.
    A state that was met once adds 0. GiGPO (Feng et al. 2025, arXiv:2505.10978, eq. 3 and 6 to 8).

    Args:
        reward_EK: Reward of each turn; NaN where an episode has none. Fewer than two episodes teach nothing.
        state_EK: Number of the state that each turn began in.
    """
    mask_EK = ~reward_EK.isnan()
    known_E, own_EK = mask_EK.any(1), reward_EK.nan_to_num()
    found_EK = torch.zeros_like(own_EK)
    if int(known_E.sum()) < 2:
        return found_EK
    found_EK[known_E] = group_advantages(own_EK[known_E].sum(1)[None], scaled=scaled)[0][:, None]
    return_EK = own_EK.clone()
    for turn in reversed(range(own_EK.shape[1] - 1)):
        return_EK[:, turn] += discount * return_EK[:, turn + 1]
    for state in state_EK[mask_EK].unique():
        same_EK = mask_EK & (state_EK == state)
        if int(same_EK.sum()) > 1:
            found_EK[same_EK] += weight * group_advantages(return_EK[same_EK][None], scaled=scaled)[0]
    return found_EK.masked_fill(~mask_EK, 0)


def leave_one_out(reward_PG: Tensor) -> Tensor:
    """Reward minus the mean of the other answers to the same prompt (P, G), G > 1.

    RLOO (Ahmadian et al. 2024, arXiv:2402.14740, eq. 8). It is G / (G - 1) times the centred reward.
    """
    others = reward_PG.shape[1] - 1
    return reward_PG - (reward_PG.sum(1, keepdim=True) - reward_PG) / others


def whitened(value_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """Value minus the mean over all tokens of all answers, divided by their standard deviation; 0 where there is none.

    REINFORCE++ (Hu 2025, arXiv:2501.03262): one baseline for the whole batch.
    """
    known = value_BL[mask_BL]
    spread = known.std(correction=0)
    return ((value_BL - known.mean()) / (spread + EPSILON)).masked_fill(~mask_BL, 0)


def returns_to_come(value_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """Sum of the values of each token and of those after it (B, L)."""
    return value_BL.masked_fill(~mask_BL, 0).flip(1).cumsum(1).flip(1)


def overlong_penalty(tokens_B: Tensor, *, limit: int, buffer: int) -> Tensor:
    """Penalty (B,) of long answers: 0 up to `limit - buffer` tokens, -1 at the limit, a straight line between.

    Soft overlong punishment of DAPO (Yu et al. 2025, arXiv:2503.14476, eq. 13).

    Args:
        tokens_B: Tokens of each answer, at most `limit`.
        buffer: > 0.
    """
    return ((limit - buffer - tokens_B).double() / buffer).clamp(-1, 0)


def length_reward(tokens_PG: Tensor, right_PG: Tensor) -> Tensor:
    """Reward (P, G) from 0.5 for the shortest answer to a prompt to -0.5 for the longest; 0 at most for wrong ones.

    0.5 - (tokens - fewest) / (most - fewest), and 0 where all are equally long: Kimi k1.5 (Kimi Team 2025,
    arXiv:2501.12599, section 2.3.3).

    Args:
        tokens_PG: Tokens of each answer; NaN of one that does not count.
        right_PG: Whether each answer is right.
    """
    fewest_P1 = tokens_PG.nan_to_num(math.inf).amin(1, keepdim=True)
    spread_P1 = tokens_PG.nan_to_num(-math.inf).amax(1, keepdim=True) - fewest_P1
    reward_PG = 0.5 - torch.where(spread_P1 == 0, 0.5, (tokens_PG - fewest_P1) / spread_P1)
    return torch.where(right_PG, reward_PG, reward_PG.clamp_max(0))


def all_rewards_equal(reward_PG: Tensor) -> Tensor:
    """Whether all answers to a prompt have the same reward (P,), so that nothing can be learnt from it; NaN is none."""
    return reward_PG.nan_to_num(-math.inf).amax(1) <= reward_PG.nan_to_num(math.inf).amin(1)


class Clipped(NamedTuple):
    """Losses of tokens (B, L), or of whole answers (B, 1), and whether clipping took away the gradient of each."""

    loss: Tensor
    clipped: Tensor


def clipped(log_ratio: Tensor, advantage: Tensor, *, low: float, high: float) -> Clipped:
    """-min(ratio A, clip(ratio, 1 - low, 1 + high) A), elementwise (Schulman et al. 2017, arXiv:1707.06347, eq. 7).

    DAPO (Yu et al. 2025, arXiv:2503.14476, eq. 10) has a `high` above `low`, so that unlikely tokens may grow.

    Args:
        log_ratio: log p now minus log p when it was written.
        advantage: A, how much better than expected; gets no gradient.
        low: How far a ratio may fall below 1 where A < 0, 0 < low < 1.
        high: How far it may rise above 1 where A > 0.
    """
    ratio = log_ratio.exp()
    loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    beyond = ((advantage > 0) & (ratio > 1 + high)) | ((advantage < 0) & (ratio < 1 - low))
    return Clipped(loss, beyond)


def capped(log_p: Tensor, log_ratio: Tensor, advantage: Tensor, *, high: float) -> Clipped:
    """-min(ratio, 1 + high) A log p, elementwise; the ratio gets no gradient, and says so of itself where it is cut.

    CISPO (MiniMax 2025, arXiv:2506.13585, eq. 4, 5), which has no lower bound: a rare token that a long answer turned
    on still learns, where clipping would leave it out. Arguments as those of `clipped`.
    """
    ratio = log_ratio.detach().exp()
    return Clipped(-ratio.clamp_max(1 + high) * advantage * log_p, ratio > 1 + high)


def of_actions(log_ratio_BL: Tensor, mask_BL: Tensor, normalise: Normalise) -> Tensor:
    """Logarithms of the ratios of what counts as one action: (B, L) of tokens, (B, 1) of whole answers.

    `mean_ratio` is the geometric mean of the ratios of an answer's tokens (GSPO, Zheng et al. 2025, arXiv:2507.18071,
    eq. 7), `whole` their product (RLOO, Ahmadian et al. 2024, arXiv:2402.14740).
    """
    log_ratio_BL = log_ratio_BL.masked_fill(~mask_BL, 0)
    if normalise not in WHOLE:
        return log_ratio_BL
    sum_B1 = log_ratio_BL.sum(1, keepdim=True)
    return sum_B1 if normalise == "whole" else sum_B1 / mask_BL.sum(1, keepdim=True).clamp_min(1)


def divergence(log_p: Tensor, reference: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = log p_reference - log p, elementwise, >= 0: an unbiased estimate of KL(p || reference).

    k3 of Schulman 2020, "Approximating KL divergence", as in GRPO (Shao et al. 2024, arXiv:2402.03300, eq. 4).
    """
    difference = reference - log_p
    return torch.expm1(difference) - difference


def adapted_beta(beta: float, divergence: float, *, target: float, share: float) -> float:
    """The factor of the divergence for the next rollout: beta (1 + clip(divergence / target - 1, -0.2, 0.2) share).

    Proportional controller of Ziegler et al. 2019, arXiv:1909.08593, section 2.2.

    Args:
        beta: The factor of this rollout, > 0.
        divergence: From the reference, in the unit of `target`.
        target: > 0.
        share: Answers of this rollout over the controller's horizon, 0 to 1.
    """
    return beta * (1 + min(max(divergence / target - 1, -0.2), 0.2) * share)


class Importance(NamedTuple):
    """Weights of tokens (B, L), or of whole answers (B, 1), without a gradient, and whether each was cut to the cap."""

    weight: Tensor
    capped: Tensor


def importance(old_BL: Tensor, sampled_BL: Tensor, mask_BL: Tensor, *, cap: float, normalise: Normalise) -> Importance:
    """min(p / p_sampler, cap): how much likelier the trained model finds what the sampler sampled.

    Truncated importance sampling (Ionides 2008), as Yao et al. 2025, "Your efficient RL framework secretly brings you
    off-policy RL training", weigh each token's loss by it.

    Args:
        old_BL: Log-probabilities by the model that trains, before the first update.
        sampled_BL: Those that the sampler sampled the tokens with.
        mask_BL: Which tokens there are.
        cap: Highest weight, > 0.
        normalise: As of `policy_loss`; where an answer is one action, it has one weight.
    """
    difference_BL = of_actions((old_BL - sampled_BL).detach(), mask_BL, normalise)
    return Importance(difference_BL.exp().clamp_max(cap), difference_BL > math.log(cap))


def policy_loss(
    log_p_BL: Tensor,
    old_BL: Tensor,
    advantage_BL: Tensor,
    mask_BL: Tensor,
    *,
    low: float,
    high: float,
    normalise: Normalise,
    longest: int,
    beyond: Beyond = "cut",
    reference_BL: Tensor | None = None,
    beta: float = 0.0,
    weight_BL: Tensor | None = None,
    entropy_BL: Tensor | None = None,
    entropy_bonus: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Loss of each answer (B,), to be summed and divided by the summed `weights`; and the clipped tokens (B, L).

    Args:
        log_p_BL: Log-probabilities now, in nats.
        old_BL: The same when the answers were written; no gradient.
        advantage_BL: Advantage of each token; that of an answer's first one is that of the answer.
        mask_BL: Which tokens there are.
        low: See `clipped`.
        high: See `clipped`.
        normalise: `answer`: mean over the tokens of each answer (GRPO). `token`: sum, for a mean over the tokens of all
            answers (DAPO). `constant`: sum divided by `longest` (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783).
            `whole`, `mean_ratio`: the answer is one action, with one ratio; see `of_actions`.
        longest: Most tokens that an answer may have.
        beyond: `cut`: see `clipped`. `cap`: see `capped`, where an answer's log p is as its ratio is.
        reference_BL: Log-probabilities of the reference, where beta > 0.
        beta: Factor of the divergence from the reference, which is added.
        weight_BL: Weights of `importance`, which the loss is multiplied by, and the divergence is not; None: all 1.
        entropy_BL: Entropy of the distribution that each token was drawn from, in nats, where entropy_bonus > 0.
        entropy_bonus: Factor of the entropy, which is taken off over the same tokens as the divergence is added.
    """
    log_ratio_BA = of_actions(log_p_BL - old_BL, mask_BL, normalise)
    whole = normalise in WHOLE
    advantage_BA = advantage_BL[:, :1] if whole else advantage_BL
    if beyond == "cap":
        surrogate = capped(of_actions(log_p_BL, mask_BL, normalise), log_ratio_BA, advantage_BA, high=high)
    else:
        surrogate = clipped(log_ratio_BA, advantage_BA, low=low, high=high)
    loss_BA = surrogate.loss if weight_BL is None else surrogate.loss * weight_BL
    loss_B = loss_BA[:, 0] if whole else over_tokens(loss_BA, mask_BL, normalise, longest)
    clipped_BL = surrogate.clipped & mask_BL
    if beta:
        assert reference_BL is not None
        penalty_BL = divergence(log_p_BL, reference_BL)
        loss_B = loss_B + beta * over_tokens(penalty_BL, mask_BL, normalise, longest)
    if entropy_BL is not None:
        loss_B = loss_B - entropy_bonus * over_tokens(entropy_BL, mask_BL, normalise, longest)
    return loss_B, clipped_BL


def over_tokens(value_BL: Tensor, mask_BL: Tensor, normalise: Normalise, longest: int) -> Tensor:
    """Value (B,) of each answer from those of its tokens; see `policy_loss`."""
    sum_B = value_BL.masked_fill(~mask_BL, 0).sum(1)
    if normalise in ("answer", "mean_ratio"):
        return sum_B / mask_BL.sum(1).clamp_min(1)
    return sum_B / longest if normalise == "constant" else sum_B


def weights(tokens_B: Tensor, normalise: Normalise) -> Tensor:
    """Weight (B,) of each answer in the mean: its tokens where all tokens count alike, else 1."""
    return tokens_B if normalise == "token" else torch.ones_like(tokens_B)
