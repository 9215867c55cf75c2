"""Losses of reward models.

Legend: P pairs of answers.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def bradley_terry(chosen_P: Tensor, rejected_P: Tensor, margin_P: Tensor, *, centre: float) -> Tensor:
    """-log sigmoid(r_chosen - r_rejected - margin), the Bradley-Terry model's, plus `centre` (r_chosen + r_rejected)^2.

    Ouyang et al. 2022 (arXiv:2203.02155), eq. 1; margins as Touvron et al. 2023 (arXiv:2307.09288), eq. 2; centring as
    Eisenstein et al. 2023 (arXiv:2312.09244).

    Returns:
        Loss of each pair (P,), in nats, in the precision of the rewards.
    """
    loss_P = -functional.logsigmoid(chosen_P - rejected_P - margin_P)
    return loss_P + centre * (chosen_P + rejected_P) ** 2
