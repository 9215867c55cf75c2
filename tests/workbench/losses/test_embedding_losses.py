"""Losses of embeddings equal their formulas, written out in float64 for each row."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from workbench.losses import embedding_losses as losses

GENERATOR = torch.Generator().manual_seed(3)
QUERY_BD = torch.randn(4, 6, generator=GENERATOR, dtype=torch.float64)
PASSAGE_ND = torch.randn(7, 6, generator=GENERATOR, dtype=torch.float64)
EXCLUDED_BN = torch.zeros(4, 7, dtype=torch.bool)
EXCLUDED_BN[0, [0, 3]] = EXCLUDED_BN[2, 5] = True
OWN_B = torch.arange(4)


def cosine(one: Tensor, other: Tensor) -> float:
    x, y = one.double().numpy(), other.double().numpy()
    return float(x @ y / math.sqrt(x @ x) / math.sqrt(y @ y))


def unit(embedding: Tensor, size: int = 6) -> Tensor:
    return losses.leading(embedding, size, normalise=True).double()


def test_leading_numbers_have_length_one() -> None:
    found = losses.leading(QUERY_BD, 4, normalise=True)
    np.testing.assert_allclose(found.numpy(), (QUERY_BD[:, :4] / QUERY_BD[:, :4].norm(dim=1, keepdim=True)), rtol=1e-6)
    assert torch.equal(losses.leading(QUERY_BD, 4, normalise=False), QUERY_BD[:, :4].float())


def test_contrastive_is_the_cross_entropy_of_the_own_passage() -> None:
    temperature, wanted = 0.1, 0.0
    for row in range(4):
        similar = [cosine(QUERY_BD[row], passage) / temperature for passage in PASSAGE_ND]
        # A row's own passage counts, whatever is said of it.
        among = [n for n in range(7) if n == row or not EXCLUDED_BN[row, n]]
        wanted -= similar[row] - math.log(sum(math.exp(similar[n]) for n in among))
    found = losses.contrastive(unit(QUERY_BD), unit(PASSAGE_ND), OWN_B, EXCLUDED_BN, temperature=temperature)
    assert float(found) == pytest.approx(wanted, rel=1e-6)


def test_triplet_is_the_hinge_of_cosine_distances() -> None:
    anchor, positive, negative = QUERY_BD[[0, 0, 1]], PASSAGE_ND[[1, 1, 2]], PASSAGE_ND[[3, 4, 5]]
    weight = torch.tensor([0.5, 0.5, 1.0], dtype=torch.float64)
    terms = [
        max(0.0, 0.3 + (1 - cosine(anchor[n], positive[n])) - (1 - cosine(anchor[n], negative[n]))) * float(weight[n])
        for n in range(3)
    ]
    found = losses.triplet(unit(anchor), unit(positive), unit(negative), weight, margin=0.3)
    assert float(found) == pytest.approx(sum(terms), rel=1e-6) and sum(terms) > 0


def test_cosent_orders_similarities_as_scores() -> None:
    similarity, score = [0.3, -0.2, 0.9, 0.1], [1.0, 3.0, 2.0, 2.0]
    exponents = [
        math.exp((similarity[i] - similarity[j]) / 0.5) for i in range(4) for j in range(4) if score[i] < score[j]
    ]
    both = [torch.tensor(values, dtype=torch.float64) for values in (similarity, score)]
    found = losses.cosent(*both, temperature=0.5)
    assert float(found) / 4 == pytest.approx(math.log(1 + sum(exponents)), rel=1e-12)
    alike = losses.cosent(both[0], torch.ones(4), temperature=0.5)
    assert float(alike) == 0, "nothing to order"


def test_squared_distance_of_similarities() -> None:
    found = losses.squared(torch.tensor([0.5, -1.0]), torch.tensor([1.0, 0.0]))
    assert float(found) == pytest.approx(0.25 + 1)


def _contrastive(query: Tensor, passage: Tensor) -> Tensor:
    return losses.contrastive(query, passage, OWN_B, EXCLUDED_BN, temperature=0.5)


def _triplet(query: Tensor, passage: Tensor) -> Tensor:
    weight_M = torch.tensor([1.0, 0.5, 0.5, 0.25], dtype=torch.float64)
    gap_M = (query * (passage[:4] - passage[3:7])).sum(1)
    assert (gap_M - 0.3).abs().min() > 1e-3, "no triplet stands at the bend"
    found = losses.triplet(query, passage[:4], passage[3:7], weight_M, margin=0.3)
    assert 0 < int((gap_M < 0.3).sum()) < 4, "some triplets have no loss"
    return found


def _cosent(query: Tensor, passage: Tensor) -> Tensor:
    return losses.cosent((query * passage[:4]).sum(1), torch.tensor([0, 1, 1, 2]), temperature=0.5)


def _squared(query: Tensor, passage: Tensor) -> Tensor:
    return losses.squared((query * passage[:4]).sum(1), torch.tensor([0.0, 1.0, 0.5, 0.2], dtype=torch.float64))


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("loss", [_contrastive, _triplet, _cosent, _squared])
def test_gradients(loss: Callable[[Tensor, Tensor], Tensor], normalise: bool) -> None:
    """By finite differences, in float64."""

    def of(query: Tensor, passage: Tensor) -> Tensor:
        if normalise:
            query, passage = (each / each.norm(dim=1, keepdim=True) for each in (query, passage))
        return loss(query, passage)

    assert torch.autograd.gradcheck(of, [each.clone().requires_grad_() for each in (QUERY_BD, PASSAGE_ND)])
