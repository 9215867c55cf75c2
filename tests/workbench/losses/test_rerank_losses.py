"""Losses of rerankers equal their formulas, written out in float64 for each candidate."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from workbench.losses import rerank_losses as losses

SCORE_BC = torch.randn(4, 5, generator=torch.Generator().manual_seed(7), dtype=torch.float64) * 2
WANTED_B = torch.tensor([0.0, 1.0, 0.3, 0.9], dtype=torch.float64)


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_softmax_is_the_cross_entropy_of_the_first_candidate(temperature: float) -> None:
    wanted = 0.0
    for row in SCORE_BC.tolist():
        total = sum(math.exp(score / temperature) for score in row)
        wanted -= math.log(math.exp(row[0] / temperature) / total)
    assert losses.softmax(SCORE_BC, temperature=temperature).item() == pytest.approx(wanted, rel=1e-12)


def test_binary_is_the_mean_over_the_candidates_of_a_row() -> None:
    wanted = 0.0
    for row in SCORE_BC.tolist():
        terms = [math.log(sigmoid(row[0])), *(math.log(1 - sigmoid(score)) for score in row[1:])]
        wanted -= sum(terms) / len(terms)
    assert losses.binary(SCORE_BC).item() == pytest.approx(wanted, rel=1e-12)


def test_given_scores_are_probabilities_or_numbers() -> None:
    pairs = list(zip(SCORE_BC[:, 0].tolist(), WANTED_B.tolist(), strict=True))
    cross = -sum(p * math.log(sigmoid(s)) + (1 - p) * math.log(1 - sigmoid(s)) for s, p in pairs)
    assert losses.binary_of_scores(SCORE_BC[:, 0], WANTED_B).item() == pytest.approx(cross, rel=1e-12)
    squared = sum((s - p) ** 2 for s, p in pairs)
    assert losses.squared_error_of_scores(SCORE_BC[:, 0], WANTED_B).item() == pytest.approx(squared, rel=1e-12)


def test_equal_scores_cost_what_chance_does() -> None:
    even = torch.full((3, 8), 0.7)
    assert losses.softmax(even, temperature=1.0).item() == pytest.approx(3 * math.log(8), rel=1e-6)
    assert losses.binary(torch.zeros(3, 8)).item() == pytest.approx(3 * math.log(2), rel=1e-6)


ALL: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": partial(losses.softmax, temperature=0.5),
    "binary": losses.binary,
    "binary of scores": lambda score_BC: losses.binary_of_scores(score_BC[:, 0], WANTED_B),
    "squared": lambda score_BC: losses.squared_error_of_scores(score_BC[:, 0], WANTED_B),
}


@pytest.mark.parametrize("loss", ALL.values(), ids=ALL.keys())
def test_gradients_are_those_of_finite_differences(loss: Callable[[Tensor], Tensor]) -> None:
    assert torch.autograd.gradcheck(loss, [SCORE_BC.clone().requires_grad_()])


@pytest.mark.parametrize("name", ["softmax", "binary"])
def test_the_order_of_negatives_says_nothing_and_that_of_the_positive_does(name: str) -> None:
    loss = ALL[name]
    other = SCORE_BC[:, [0, 4, 2, 1, 3]]
    assert loss(other).item() == pytest.approx(loss(SCORE_BC).item(), rel=1e-12)
    assert loss(SCORE_BC[[2, 0, 3, 1]]).item() == pytest.approx(loss(SCORE_BC).item(), rel=1e-12), "nor that of rows"
    swapped = SCORE_BC[:, [1, 0, 2, 3, 4]]
    assert abs(loss(swapped).item() - loss(SCORE_BC).item()) > 1e-3


def test_what_all_candidates_have_in_common_cancels_in_the_softmax_alone() -> None:
    moved = SCORE_BC + torch.tensor([[3.0], [-2.0], [0.5], [1.0]])
    assert losses.softmax(moved, temperature=1.0).item() == pytest.approx(
        losses.softmax(SCORE_BC, temperature=1.0).item(), rel=1e-12
    )
    assert abs(losses.binary(moved).item() - losses.binary(SCORE_BC).item()) > 0.1
