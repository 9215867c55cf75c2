"""Losses of embedders, rerankers and reward models: sums over rows in float32, or losses of each pair or step.

The sums are to be divided by the rows of the global batch.

Legend: B rows, N texts that are searched or steps of answers, D numbers of an embedding, M triplets, C candidates of a
row (first the one that belongs to its query, then negatives), P pairs of answers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

MINUS_INFINITY = float("-inf")


def leading(embedding_BD: Tensor, size: int, *, normalise: bool) -> Tensor:
    """The first `size` numbers of embeddings, as an embedding of its own (Kusupati et al. 2022, arXiv:2205.13147).
    `normalise`: scale each to length 1."""
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
    """Hinge of cosine distances (Schroff et al. 2015, arXiv:1503.03832), weighted and summed over triplets. `weight_M`:
    one over the negatives of the row, so that each row counts once."""
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


def squared_difference(similarity_B: Tensor, score_B: Tensor) -> Tensor:
    """Squared distance of similarities, or of predicted scores, from given scores, summed."""
    return ((similarity_B - score_B) ** 2).sum()


def listwise_softmax(score_BC: Tensor, *, temperature: float) -> Tensor:
    """Cross-entropy of the first candidate among all of its row, in nats.

    ListNet's top-one loss with one relevant passage (Cao et al. 2007), which is InfoNCE over a list.
    """
    return -(score_BC / temperature).log_softmax(1)[:, 0].sum()


def binary_candidates(score_BC: Tensor) -> Tensor:
    """Binary cross-entropy of candidates, the mean over each row, in nats: the first belongs to the query."""
    wanted_BC = torch.zeros_like(score_BC)
    wanted_BC[:, 0] = 1
    return functional.binary_cross_entropy_with_logits(score_BC, wanted_BC, reduction="none").mean(1).sum()


def binary_of_scores(score_B: Tensor, wanted_B: Tensor) -> Tensor:
    """Binary cross-entropy of given scores from 0 to 1, in nats."""
    return functional.binary_cross_entropy_with_logits(score_B, wanted_B, reduction="sum")


def margin_mse(score_BC: Tensor, teacher_BC: Tensor) -> Tensor:
    """Squared difference of a student's and a teacher's margins between the first candidate of a row and each other
    one, the mean over these (Hofstätter et al. 2020, arXiv:2010.02666)."""
    student_BN, wanted_BN = (each[:, :1] - each[:, 1:] for each in (score_BC, teacher_BC))
    return ((student_BN - wanted_BN) ** 2).mean(1).sum()


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
