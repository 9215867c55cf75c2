"""Losses of reward models.

Legend: P pairs of answers, N steps of answers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def bradley_terry(
    chosen_P: Tensor, rejected_P: Tensor, margin_P: Tensor, *, centre: float, tie_P: Tensor | None = None
) -> Tensor:
    """-log sigmoid(r_chosen - r_rejected - margin), the Bradley-Terry model's, plus `centre` (r_chosen + r_rejected)^2.

    Of a tie with d = r_chosen - r_rejected, the cross entropy with the target 1/2: -(log sigmoid(d) + log sigmoid(-d))
    / 2, which is least where both rewards are equal, and the same whichever answer stands first.

    Ouyang et al. 2022 (arXiv:2203.02155), eq. 1; margins as Touvron et al. 2023 (arXiv:2307.09288), eq. 2; centring as
    Eisenstein et al. 2023 (arXiv:2312.09244).

    Args:
        margin_P: By how much the reward of the chosen answer is to be higher; 0 of ties.
        tie_P: Which pairs are ties, bool; None: none is.

    Returns:
        Loss of each pair (P,), in nats, in the precision of the rewards.
    """
    gap_P = chosen_P - rejected_P
    loss_P = -functional.logsigmoid(gap_P - margin_P)
    if tie_P is not None:
        loss_P = torch.where(tie_P, -(functional.logsigmoid(gap_P) + functional.logsigmoid(-gap_P)) / 2, loss_P)
    return loss_P + centre * (chosen_P + rejected_P) ** 2


def step_cross_entropy(logit_N: Tensor, label_N: Tensor) -> Tensor:
    """-label log sigmoid(logit) - (1 - label) log sigmoid(-logit), of each step of an answer: a process reward model's.

    Lightman et al. 2023 (arXiv:2305.20050), with labels that are 0 or 1; Wang et al. 2024 (arXiv:2312.08935), eq. 2,
    whose soft estimates are in between.

    Returns:
        Loss of each step (N,), in nats, in the precision of the logits.
    """
    return -label_N * functional.logsigmoid(logit_N) - (1 - label_N) * functional.logsigmoid(-logit_N)
