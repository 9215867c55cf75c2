"""Losses of sentence embeddings. All are sums over rows, in float32, to be divided by the rows of the global batch.

Legend: B rows, N texts that are searched, D numbers of an embedding, M triplets.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

MINUS_INFINITY = float("-inf")


def leading(embedding_BD: Tensor, size: int, *, normalise: bool) -> Tensor:
    """The first `size` numbers of embeddings, as an embedding of its own (Kusupati et al. 2022, arXiv:2205.13147).

    Args:
        normalise: Scale each to length 1.
    """
    prefix_Bd = embedding_BD[:, :size].float()
    return functional.normalize(prefix_Bd, dim=1) if normalise else prefix_Bd


def contrastive(
    query_BD: Tensor, passage_ND: Tensor, own_B: Tensor, excluded_BN: Tensor, *, temperature: float
) -> Tensor:
    """InfoNCE (van den Oord et al. 2018, arXiv:1807.03748): cross-entropy of each query's own passage among all.

    Args:
        own_B: Place of each query's passage.
        excluded_BN: Passages that are no negatives of a query; its own counts whatever stands there.

    Returns:
        Scalar, in nats, summed over queries.
    """
    logits_BN = query_BD @ passage_ND.T / temperature
    own_B1 = own_B[:, None]
    excluded_BN = excluded_BN.scatter(1, own_B1, torch.zeros_like(own_B1, dtype=torch.bool))
    return functional.cross_entropy(logits_BN.masked_fill(excluded_BN, MINUS_INFINITY), own_B, reduction="sum")


def triplet(anchor_MD: Tensor, positive_MD: Tensor, negative_MD: Tensor, weight_M: Tensor, *, margin: float) -> Tensor:
    """Hinge of cosine distances (Schroff et al. 2015, arXiv:1503.03832), weighted and summed over triplets.

    Args:
        weight_M: One over the negatives of the row, so that each row counts once.
    """
    gap_M = (anchor_MD * negative_MD).sum(1) - (anchor_MD * positive_MD).sum(1)
    return ((gap_M + margin).clamp_min(0) * weight_M).sum()


def cosent(similarity_B: Tensor, score_B: Tensor, *, temperature: float) -> Tensor:
    """CoSENT (Su 2022): log(1 + sum of exp((s_i - s_j) / t) over pairs of which j has the higher score).

    It looks at all rows of the batch at once, and so is no sum over them: times B here, like those that are.
    """
    difference_BB = (similarity_B[:, None] - similarity_B[None]) / temperature
    ordered_BB = score_B[:, None] < score_B[None]
    terms = torch.cat([difference_BB.new_zeros(1), difference_BB[ordered_BB]])
    return terms.logsumexp(0) * len(similarity_B)


def squared(similarity_B: Tensor, score_B: Tensor) -> Tensor:
    """Squared distance of similarities from scores, summed."""
    return ((similarity_B - score_B) ** 2).sum()
