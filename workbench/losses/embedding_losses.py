"""Distances of a student's embeddings from its teacher's, means over the texts of a batch.

Legend: N texts, D numbers of an embedding of both, E of a teacher's.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def mse(student_ND: Tensor, teacher_ND: Tensor) -> Tensor:
    """Squared difference of the numbers, a mean over these too (Reimers and Gurevych 2020, arXiv:2004.09813)."""
    return F.mse_loss(student_ND, teacher_ND)


def cosine(student_ND: Tensor, teacher_ND: Tensor) -> Tensor:
    """1 - cosine of the angle between the two embeddings of a text (Kim et al. 2023, arXiv:2301.12005)."""
    return (1 - F.cosine_similarity(student_ND, teacher_ND, dim=1)).mean()


def relation(student_ND: Tensor, teacher_NE: Tensor) -> Tensor:
    """Squared difference of the cosines of every two texts of the batch, whatever the sizes (Park et al. 2019,
    arXiv:1904.05068, with cosines in the place of distances)."""
    student_NN, teacher_NN = (each @ each.T for each in (F.normalize(own, dim=1) for own in (student_ND, teacher_NE)))
    return F.mse_loss(student_NN, teacher_NN)


LOSSES = {"cosine": cosine, "mse": mse, "relation": relation}
