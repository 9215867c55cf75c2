"""Losses of embeddings equal their formulas, written out in float64 for each row."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from workbench.losses import ranking_losses
from workbench.losses.divergences import log_probs, scaled
from workbench.losses.ranking_losses import bradley_terry, step_cross_entropy

GENERATOR = torch.Generator().manual_seed(3)
QUERY_BD = torch.randn(4, 6, generator=GENERATOR, dtype=torch.float64)
PASSAGE_ND = torch.randn(7, 6, generator=GENERATOR, dtype=torch.float64)
EXCLUDED_BN = torch.zeros(4, 7, dtype=torch.bool)
EXCLUDED_BN[0, [0, 3]] = EXCLUDED_BN[2, 5] = True
OWN_B = torch.arange(4)
SCORE_BC = torch.randn(4, 5, generator=torch.Generator().manual_seed(7), dtype=torch.float64) * 2
WANTED_B = torch.tensor([0.0, 1.0, 0.3, 0.9], dtype=torch.float64)
CHOSEN, REJECTED, MARGIN = [0.5, -1.0, 30.0, -40.0], [0.2, 0.7, -30.0, 60.0], [0.0, 0.5, 1.0, 0.0]


def cosine(one: Tensor, other: Tensor) -> float:
    x, y = one.double().numpy(), other.double().numpy()
    return float(x @ y / math.sqrt(x @ x) / math.sqrt(y @ y))


def unit(embedding: Tensor, size: int = 6) -> Tensor:
    return ranking_losses.leading(embedding, size, normalise=True).double()


def test_leading_numbers_have_length_one() -> None:
    found = ranking_losses.leading(QUERY_BD, 4, normalise=True)
    np.testing.assert_allclose(found.numpy(), (QUERY_BD[:, :4] / QUERY_BD[:, :4].norm(dim=1, keepdim=True)), rtol=1e-6)
    assert torch.equal(ranking_losses.leading(QUERY_BD, 4, normalise=False), QUERY_BD[:, :4].float())


def test_contrastive_is_the_cross_entropy_of_the_own_passage() -> None:
    temperature, wanted = 0.1, 0.0
    for row in range(4):
        similar = [cosine(QUERY_BD[row], passage) / temperature for passage in PASSAGE_ND]
        # A row's own passage counts, whatever is said of it.
        among = [n for n in range(7) if n == row or not EXCLUDED_BN[row, n]]
        wanted -= similar[row] - math.log(sum(math.exp(similar[n]) for n in among))
    found = ranking_losses.contrastive(unit(QUERY_BD), unit(PASSAGE_ND), OWN_B, EXCLUDED_BN, temperature=temperature)
    assert float(found) == pytest.approx(wanted, rel=1e-6)


def test_triplet_is_the_hinge_of_cosine_distances() -> None:
    anchor, positive, negative = QUERY_BD[[0, 0, 1]], PASSAGE_ND[[1, 1, 2]], PASSAGE_ND[[3, 4, 5]]
    weight = torch.tensor([0.5, 0.5, 1.0], dtype=torch.float64)
    terms = [
        max(0.0, 0.3 + (1 - cosine(anchor[n], positive[n])) - (1 - cosine(anchor[n], negative[n]))) * float(weight[n])
        for n in range(3)
    ]
    found = ranking_losses.triplet(unit(anchor), unit(positive), unit(negative), weight, margin=0.3)
    assert float(found) == pytest.approx(sum(terms), rel=1e-6) and sum(terms) > 0


def test_cosent_orders_similarities_as_scores() -> None:
    similarity, score = [0.3, -0.2, 0.9, 0.1], [1.0, 3.0, 2.0, 2.0]
    exponents = [
        math.exp((similarity[i] - similarity[j]) / 0.5) for i in range(4) for j in range(4) if score[i] < score[j]
    ]
    both = [torch.tensor(values, dtype=torch.float64) for values in (similarity, score)]
    found = ranking_losses.cosent(*both, temperature=0.5)
    assert float(found) / 4 == pytest.approx(math.log(1 + sum(exponents)), rel=1e-12)
    alike = ranking_losses.cosent(both[0], torch.ones(4), temperature=0.5)
    assert float(alike) == 0, "nothing to order"


def test_squared_distance_of_similarities() -> None:
    found = ranking_losses.squared_difference(torch.tensor([0.5, -1.0]), torch.tensor([1.0, 0.0]))
    assert float(found) == pytest.approx(0.25 + 1)


def _contrastive(query: Tensor, passage: Tensor) -> Tensor:
    return ranking_losses.contrastive(query, passage, OWN_B, EXCLUDED_BN, temperature=0.5)


def _triplet(query: Tensor, passage: Tensor) -> Tensor:
    weight_M = torch.tensor([1.0, 0.5, 0.5, 0.25], dtype=torch.float64)
    gap_M = (query * (passage[:4] - passage[3:7])).sum(1)
    assert (gap_M - 0.3).abs().min() > 1e-3, "no triplet stands at the bend"
    found = ranking_losses.triplet(query, passage[:4], passage[3:7], weight_M, margin=0.3)
    assert 0 < int((gap_M < 0.3).sum()) < 4, "some triplets have no loss"
    return found


def _cosent(query: Tensor, passage: Tensor) -> Tensor:
    return ranking_losses.cosent((query * passage[:4]).sum(1), torch.tensor([0, 1, 1, 2]), temperature=0.5)


def _squared(query: Tensor, passage: Tensor) -> Tensor:
    return ranking_losses.squared_difference(
        (query * passage[:4]).sum(1), torch.tensor([0.0, 1.0, 0.5, 0.2], dtype=torch.float64)
    )


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("loss", [_contrastive, _triplet, _cosent, _squared])
def test_gradients(loss: Callable[[Tensor, Tensor], Tensor], normalise: bool) -> None:
    """By finite differences, in float64."""

    def of(query: Tensor, passage: Tensor) -> Tensor:
        if normalise:
            query, passage = (each / each.norm(dim=1, keepdim=True) for each in (query, passage))
        return loss(query, passage)

    assert torch.autograd.gradcheck(of, [each.clone().requires_grad_() for each in (QUERY_BD, PASSAGE_ND)])


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_softmax_is_the_cross_entropy_of_the_first_candidate(temperature: float) -> None:
    wanted = 0.0
    for row in SCORE_BC.tolist():
        total = sum(math.exp(score / temperature) for score in row)
        wanted -= math.log(math.exp(row[0] / temperature) / total)
    assert ranking_losses.listwise_softmax(SCORE_BC, temperature=temperature).item() == pytest.approx(wanted, rel=1e-12)


def test_binary_is_the_mean_over_the_candidates_of_a_row() -> None:
    wanted = 0.0
    for row in SCORE_BC.tolist():
        terms = [math.log(sigmoid(row[0])), *(math.log(1 - sigmoid(score)) for score in row[1:])]
        wanted -= sum(terms) / len(terms)
    assert ranking_losses.binary_candidates(SCORE_BC).item() == pytest.approx(wanted, rel=1e-12)


def test_given_scores_are_probabilities_or_numbers() -> None:
    pairs = list(zip(SCORE_BC[:, 0].tolist(), WANTED_B.tolist(), strict=True))
    cross = -sum(p * math.log(sigmoid(s)) + (1 - p) * math.log(1 - sigmoid(s)) for s, p in pairs)
    assert ranking_losses.binary_of_scores(SCORE_BC[:, 0], WANTED_B).item() == pytest.approx(cross, rel=1e-12)
    squared = sum((s - p) ** 2 for s, p in pairs)
    assert ranking_losses.squared_difference(SCORE_BC[:, 0], WANTED_B).item() == pytest.approx(squared, rel=1e-12)


def test_margins_are_compared_with_those_of_the_teacher() -> None:
    teacher_BC = SCORE_BC.flip(0)
    wanted = [
        np.mean([((own[0] - own[c]) - (said[0] - said[c])) ** 2 for c in range(1, 5)])
        for own, said in zip(SCORE_BC.numpy(), teacher_BC.numpy(), strict=True)
    ]
    assert float(ranking_losses.margin_mse(SCORE_BC, teacher_BC)) == pytest.approx(sum(wanted), rel=1e-12)


@pytest.mark.slow
def test_losses_to_a_teacher_equal_those_of_sentence_transformers() -> None:
    from sentence_transformers.cross_encoder.losses import MarginMSELoss
    from sentence_transformers.sentence_transformer.losses import DistillKLDivLoss

    teacher_BC, columns = SCORE_BC.flip(0), list(SCORE_BC.T)
    as_made = SimpleNamespace(loss_fct=torch.nn.MSELoss(), logits_from_pairs=lambda pairs, **_: columns[pairs[0][1]])
    texts = [[0] * 4, *([column] * 4 for column in range(5))]
    theirs = MarginMSELoss.forward(as_made, texts, teacher_BC)  # type: ignore[arg-type]
    assert float(ranking_losses.margin_mse(SCORE_BC, teacher_BC)) / 4 == pytest.approx(float(theirs), rel=1e-5)
    heat: dict[str, Any] = {"student_temperature": 2.0, "teacher_temperature": 2.0, "_checked_teacher_scale": True}
    scoring = {"similarity_fct": lambda _, column: column, "loss_fct": torch.nn.KLDivLoss(reduction="batchmean")}
    theirs = DistillKLDivLoss.compute_loss_from_embeddings(
        SimpleNamespace(**heat, **scoring), [SCORE_BC, *columns], teacher_BC
    )  # type: ignore[arg-type]
    ours = scaled("forward_kl", temperature=2.0, beta=0.5, skew=0.1)(
        *(log_probs(s, 2.0) for s in (SCORE_BC, teacher_BC))
    )
    assert float(ours) / 4 == pytest.approx(float(theirs), rel=1e-5)


def test_equal_scores_cost_what_chance_does() -> None:
    even = torch.full((3, 8), 0.7)
    assert ranking_losses.listwise_softmax(even, temperature=1.0).item() == pytest.approx(3 * math.log(8), rel=1e-6)
    assert ranking_losses.binary_candidates(torch.zeros(3, 8)).item() == pytest.approx(3 * math.log(2), rel=1e-6)


ALL: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": partial(ranking_losses.listwise_softmax, temperature=0.5),
    "binary": ranking_losses.binary_candidates,
    "binary of scores": lambda score_BC: ranking_losses.binary_of_scores(score_BC[:, 0], WANTED_B),
    "squared": lambda score_BC: ranking_losses.squared_difference(score_BC[:, 0], WANTED_B),
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
    assert ranking_losses.listwise_softmax(moved, temperature=1.0).item() == pytest.approx(
        ranking_losses.listwise_softmax(SCORE_BC, temperature=1.0).item(), rel=1e-12
    )
    assert abs(ranking_losses.binary_candidates(moved).item() - ranking_losses.binary_candidates(SCORE_BC).item()) > 0.1


def tensors(*values: list[float]) -> list[torch.Tensor]:
    return [torch.tensor(each, dtype=torch.float64) for each in values]


def test_equals_the_formula() -> None:
    found = bradley_terry(*tensors(CHOSEN, REJECTED, MARGIN), centre=0.1)
    for loss, chosen, rejected, margin in zip(found.tolist(), CHOSEN, REJECTED, MARGIN, strict=True):
        gap = chosen - rejected - margin
        log_sigmoid = -math.log1p(math.exp(-gap)) if gap > -30 else gap
        assert loss == pytest.approx(-log_sigmoid + 0.1 * (chosen + rejected) ** 2, rel=1e-12)


def test_equal_rewards_cost_ln_2_and_what_is_shared_cancels() -> None:
    even = tensors([3.0], [3.0], [0.0])
    assert bradley_terry(*even, centre=0.0).item() == pytest.approx(math.log(2))
    chosen, rejected, margin = tensors([0.4], [-0.3], [0.1])
    shifted = bradley_terry(chosen + 5, rejected + 5, margin, centre=0.0)
    torch.testing.assert_close(shifted, bradley_terry(chosen, rejected, margin, centre=0.0))
    one, other = (bradley_terry(*pair, margin * 0, centre=0.0) for pair in ((chosen, rejected), (rejected, chosen)))
    torch.testing.assert_close(one - other, rejected - chosen)


def test_gradients_reward_losses() -> None:
    """By finite differences, in float64."""
    leaves = [each.requires_grad_() for each in tensors(CHOSEN[:2], REJECTED[:2])]
    margin = torch.tensor(MARGIN[:2], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda c, r: bradley_terry(c, r, margin, centre=0.3), leaves)


def test_of_a_tie_the_target_is_one_half() -> None:
    tie = torch.tensor([True, False, True, False])
    chosen, rejected, margin = tensors(CHOSEN, REJECTED, [0.0, 0.5, 0.0, 0.0])
    found = bradley_terry(chosen, rejected, margin, centre=0.1, tie_P=tie)
    bare = bradley_terry(chosen, rejected, margin, centre=0.1)
    torch.testing.assert_close(found[~tie], bare[~tie], rtol=0, atol=0)
    for loss, first, second in zip(found[tie].tolist(), chosen[tie].tolist(), rejected[tie].tolist(), strict=True):
        gap = abs(first - second)
        entropy = 0.5 * math.log1p(math.exp(-gap)) + 0.5 * (gap + math.log1p(math.exp(-gap)))
        assert loss == pytest.approx(entropy + 0.1 * (first + second) ** 2, rel=1e-12)
    swapped = bradley_terry(rejected, chosen, margin, centre=0.1, tie_P=tie)
    torch.testing.assert_close(swapped[tie], found[tie], rtol=0, atol=0)
    leaves = [each[:3].clone().requires_grad_() for each in (chosen, rejected)]
    assert torch.autograd.gradcheck(
        lambda c, r: bradley_terry(c, r, margin[:3], centre=0.3, tie_P=torch.ones(3, dtype=torch.bool)), leaves
    )
    even = tensors([2.0], [2.0])
    even[0].requires_grad_()
    bradley_terry(*even, *tensors([0.0]), centre=0.0, tie_P=torch.tensor([True])).backward()
    assert even[0].grad == 0, "equal rewards are where a tie wants them"


def test_the_loss_of_a_step_equals_its_formula() -> None:
    logit, label = tensors([-2.0, 0.0, 0.7, 40.0], [0.0, 1.0, 0.25, 1.0])
    found = step_cross_entropy(logit, label)
    for loss, x, y in zip(found.tolist(), logit.tolist(), label.tolist(), strict=True):
        p = 1 / (1 + math.exp(-x))
        expected = -y * math.log(p) - ((1 - y) * math.log(1 - p) if y < 1 else 0)
        assert loss == pytest.approx(expected, rel=1e-9, abs=1e-15)
    torch.testing.assert_close(step_cross_entropy(-logit, 1 - label), found)
    leaves = [logit[:3].clone().requires_grad_()]
    assert torch.autograd.gradcheck(lambda x: step_cross_entropy(x, label[:3]), leaves)
