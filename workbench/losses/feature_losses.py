"""Distances of a student's hidden states and attention from a teacher's, for each row a mean over its real tokens.

Padding does not matter, neither its values nor its length; a row without a real token gives 0.

Legend: B rows, L padded length, D student's width, E teacher's width, H heads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.losses.chunked_loss import wide


def hidden_mse(student_BLD: Tensor, teacher_BLD: Tensor, mask_BL: Tensor) -> Tensor:
    """Squared difference (B,) of hidden states, a mean over features too (TinyBERT, Jiao et al., arXiv:1909.10351).
    `mask_BL`: bool, True at real tokens."""
    difference_BLD = _masked(student_BLD, mask_BL[..., None]) - _masked(teacher_BLD, mask_BL[..., None])
    return _mean(difference_BLD.square().mean(-1), mask_BL)


def hidden_cosine(student_BLD: Tensor, teacher_BLD: Tensor, mask_BL: Tensor) -> Tensor:
    """1 - cosine (B,) of the angle between hidden states (DistilBERT, Sanh et al. 2019, arXiv:1910.01108)."""
    student_BLD, teacher_BLD = (_masked(states, mask_BL[..., None]) for states in (student_BLD, teacher_BLD))
    return _mean(1 - F.cosine_similarity(student_BLD, teacher_BLD, dim=-1), mask_BL)


def relation(student_BLD: Tensor, teacher_BLE: Tensor, mask_BL: Tensor, *, heads: int) -> Tensor:
    """KL(teacher || student) (B,) of the similarities between tokens of a row, a mean over heads and tokens.

    The similarities are a softmax over scaled dot products of a head's features, so that widths may differ (MiniLM v2,
    Wang et al. 2021, arXiv:2012.15828). `heads`: equal parts that the widths are cut into; divides D and E.
    """
    student_BHLL, teacher_BHLL = (_similarities(states, mask_BL, heads) for states in (student_BLD, teacher_BLE))
    terms_BHLL = teacher_BHLL.exp() * (teacher_BHLL - student_BHLL)
    return _mean(terms_BHLL.sum(-1).mean(1), mask_BL)


def attention(student_BHLL: Tensor, teacher_BHLL: Tensor, mask_BL: Tensor) -> Tensor:
    """Squared difference (B,) of attention scores, a mean over heads and pairs of real tokens (TinyBERT)."""
    pairs_B1LL = mask_BL[:, None, :, None] & mask_BL[:, None, None, :]
    difference_BHLL = _masked(student_BHLL, pairs_B1LL) - _masked(teacher_BHLL, pairs_B1LL)
    return _mean(difference_BHLL.square().mean(1).flatten(1), pairs_B1LL.flatten(1))


def _similarities(states_BLD: Tensor, mask_BL: Tensor, heads: int) -> Tensor:
    """Log-softmax (B, H, L, L) of each token's similarity to the real tokens of its row."""
    parts_BHLd: Tensor = _masked(states_BLD, mask_BL[..., None]).unflatten(-1, (heads, -1)).transpose(1, 2)
    scores_BHLL = parts_BHLd @ parts_BHLd.mT / math.sqrt(parts_BHLd.shape[-1])
    # Finite, because 0 * (-inf - -inf) would be NaN.
    return scores_BHLL.masked_fill(~mask_BL[:, None, None], torch.finfo(scores_BHLL.dtype).min / 4).log_softmax(-1)


def _masked(states: Tensor, mask: Tensor) -> Tensor:
    """States in float32 or wider, 0 where `mask`, which has as many axes, is False."""
    return states.to(wide(states.dtype)).masked_fill(~mask, 0)


def _mean(values_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """Mean (B,) over the real tokens of each row."""
    return values_BL.masked_fill(~mask_BL, 0).sum(-1) / mask_BL.sum(-1).clamp(min=1)
