"""Universal logit distillation: a distance between models with different vocabularies.

Legend: N positions, V student's vocabulary, W teacher's vocabulary.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from workbench.losses.divergences import log_probs


def universal(student_logits_NV: Tensor, teacher_logits_NW: Tensor, *, temperature: float) -> Tensor:
    """Sum of |p - q| over the sorted probabilities of both models, times the temperature.

    Tokens are not matched; the smaller vocabulary is padded with probabilities of 0. The factor keeps the scale of the
    gradient independent of the temperature. Boizard et al. 2024, arXiv:2402.12030.

    Returns:
        Scalar, float32 or wider.
    """
    size = max(student_logits_NV.shape[1], teacher_logits_NW.shape[1])
    student, teacher = (
        F.pad(sorted_, (0, size - sorted_.shape[1]))
        for sorted_ in (_sorted(logits, temperature) for logits in (student_logits_NV, teacher_logits_NW))
    )
    return (student - teacher).abs().sum() * temperature


def _sorted(logits_NV: Tensor, temperature: float) -> Tensor:
    return log_probs(logits_NV, temperature).exp().sort(-1, descending=True).values
