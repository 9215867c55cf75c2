"""Advantages of answers: how much better each is than was to be expected of its prompt, or of all.

Legend: P prompts, G answers to each, B answers, L their tokens, padded.
"""

from __future__ import annotations

from torch import Tensor

EPSILON = 1e-4
"""Added to a standard deviation, as TRL does: rewards that hardly differ do not become large advantages."""


def of_group(reward_PG: Tensor, *, scaled: bool) -> Tensor:
    """Reward minus the mean of the answers to the same prompt (P, G), G > 1.

    Args:
        scaled: Divide by their standard deviation (with G - 1), as GRPO does (Shao et al. 2024, arXiv:2402.03300); Dr.
            GRPO (Liu et al. 2025, arXiv:2503.20783) does not: it makes prompts count more that are nearly always, or
            nearly never, answered well.
    """
    centred_PG = reward_PG - reward_PG.mean(1, keepdim=True)
    return centred_PG / (reward_PG.std(1, keepdim=True) + EPSILON) if scaled else centred_PG


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


def to_come(value_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """Sum of the values of each token and of those after it (B, L)."""
    return value_BL.masked_fill(~mask_BL, 0).flip(1).cumsum(1).flip(1)


def overlong(tokens_B: Tensor, *, limit: int, buffer: int) -> Tensor:
    """Penalty (B,) of long answers: 0 up to `limit - buffer` tokens, -1 at the limit, a straight line between.

    Soft overlong punishment of DAPO (Yu et al. 2025, arXiv:2503.14476, eq. 13).

    Args:
        tokens_B: Tokens of each answer, at most `limit`.
        buffer: > 0.
    """
    return ((limit - buffer - tokens_B).double() / buffer).clamp(-1, 0)


def same(reward_PG: Tensor) -> Tensor:
    """Whether all answers to a prompt have one reward (P,), so that nothing is to be learnt from it."""
    return (reward_PG == reward_PG[:, :1]).all(1)
