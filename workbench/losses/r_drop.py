"""R-Drop (Liang et al. 2021, arXiv:2106.14448): two passes over a row with different dropout should agree.

Its loss is the mean of the losses of both passes, plus a strength times the mean of KL(p || q) and KL(q || p). With no
noise the passes are equal, and the loss is that of one of them; with a strength of 0 it is the mean of the two.

Legend: N rows or supervised positions, n of them, m = 2 n, D hidden, C outputs, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.config.sections.classes_config import Kind
from workbench.losses.chunked_loss import Project, wide
from workbench.losses.class_losses import Objective


def disagreement(first_NC: Tensor, second_NC: Tensor, kind: Kind = "one") -> Tensor:
    """Mean of both KL divergences (N,) between two passes, in nats, from their logits; float32 or wider.

    The log-denominators of p and q cancel: sum_c (p_c - q_c)(log p_c - log q_c) = sum_c (p_c - q_c)(a_c - b_c). Of
    several classes each is a binary label; of numbers it is the squared difference, as their loss is.
    """
    first_NC, second_NC = (each.to(wide(each.dtype)) for each in (first_NC, second_NC))
    difference_NC = first_NC - second_NC
    if kind == "number":
        return (difference_NC**2).sum(-1)
    if kind == "several":
        return ((first_NC.sigmoid() - second_NC.sigmoid()) * difference_NC).sum(-1) / 2
    return ((first_NC.softmax(-1) - second_NC.softmax(-1)) * difference_NC).sum(-1) / 2


def twice(objective: Objective, strength: float, kind: Kind) -> Objective:
    """The objective of rows that were computed twice: of outputs (2N, C), the second pass after the first.

    The divergence counts with the weight of its row.
    """

    def both(outputs_2NC: Tensor, labels_N: Tensor, scale: float) -> Tensor:
        first_NC, second_NC = outputs_2NC.chunk(2)
        losses = objective(first_NC, labels_N, scale) + objective(second_NC, labels_N, scale)
        apart_N = disagreement(first_NC, second_NC, kind) * labels_N[:, 0]
        return losses / 2 + apart_N.sum() * (strength * scale)

    return both


def project_pairs(project: Project) -> Project:
    """An output head for hidden states (n, 2, D), which gives logits (n, 2, V)."""

    def pairs(hidden_n2D: Tensor) -> Tensor:
        logits_mV = project(hidden_n2D.flatten(0, 1))
        return logits_mV.view(-1, 2, logits_mV.shape[-1])

    return pairs


def paired(hidden_2BLD: Tensor, positions_N: Tensor) -> Tensor:
    """Hidden states (N, 2, D) at flat positions of the rows of both passes."""
    first_PD, second_PD = (half.flatten(0, 1) for half in hidden_2BLD.chunk(2))
    return torch.stack([first_PD[positions_N], second_PD[positions_N]], 1)
