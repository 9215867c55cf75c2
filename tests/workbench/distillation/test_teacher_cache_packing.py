"""What is kept of a position comes back as it was, and is what a teacher says, on average where it is drawn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from workbench.config.sections.distill_config import DistillConfig
from workbench.distillation import teacher_cache
from workbench.distillation.teacher_cache import SampledTokens, TopTokens
from workbench.losses.divergences import forward_kl, log_probs

VOCABULARIES = (300, 65_536, 65_537, 70_000, 262_144)


def _said(positions: int, vocabulary: int, *, seed: int = 0, spread: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(positions, vocabulary, generator=generator)).log_softmax(-1)


def _uniform(positions: int, k: int) -> Tensor:
    return torch.rand(positions, k, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


@given(st.sampled_from(VOCABULARIES), st.data())
def test_tokens_come_back_as_they_were(vocabulary: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, 40))
    row = st.lists(st.integers(0, vocabulary - 1), min_size=k, max_size=k).map(sorted)
    ids = np.asarray(data.draw(st.lists(row, min_size=1, max_size=5)))
    packed = teacher_cache.pack_ids(ids, vocabulary)
    assert np.array_equal(teacher_cache.unpack_ids(packed), ids)
    boundaries = math.ceil(vocabulary / 65_536) - 1
    assert sum(array.nbytes for array in packed.values()) == ids.shape[0] * (2 * k + boundaries)


def test_every_token_of_a_large_vocabulary_comes_back() -> None:
    ids = np.arange(70_000)[None]
    assert np.array_equal(teacher_cache.unpack_ids(teacher_cache.pack_ids(ids, 70_000)), ids)


def test_the_likeliest_tokens_and_the_mass_of_the_others() -> None:
    said = _said(6, 300)
    ids, found = teacher_cache.unpack_likeliest(teacher_cache.pack_likeliest(said, k=5, dtype="float32"))
    for row, tokens, numbers in zip(said.double().exp().tolist(), ids.tolist(), found.tolist(), strict=True):
        chosen = sorted(sorted(range(300), key=lambda token, row=row: -row[token])[:5])  # type: ignore[misc]
        assert tokens == chosen
        wanted = [row[token] for token in chosen]
        assert np.exp(numbers) == pytest.approx([*wanted, 1 - sum(wanted)], rel=1e-5)


@pytest.mark.parametrize("spread", [0.1, 2.0, 20.0])
def test_half_precision_still_adds_up_to_one(spread: float) -> None:
    said = _said(50, 1000, spread=spread)
    ids, found = teacher_cache.unpack_likeliest(teacher_cache.pack_likeliest(said, k=64, dtype="float16"))
    assert found.exp().sum(-1).tolist() == pytest.approx([1] * 50, abs=1e-6)
    exact = said.gather(1, ids)
    assert torch.allclose(found[:, :-1], exact, rtol=2**-10, atol=2e-3)
    assert (found[:, :-1] - exact).abs().max() > 1e-5  # it is kept in half precision


def test_more_tokens_than_there_are() -> None:
    said = _said(3, 20)
    ids, found = teacher_cache.unpack_likeliest(teacher_cache.pack_likeliest(said, k=64, dtype="float32"))
    assert ids.tolist() == [list(range(20))] * 3
    assert torch.allclose(found[:, :-1], said, atol=1e-6) and bool((found[:, -1] == -torch.inf).all())


def test_draws_weigh_one_and_name_each_token_once() -> None:
    packed = teacher_cache.pack_draws(_said(30, 300), _uniform(30, 40))
    ids, weights, negative_entropy = teacher_cache.unpack_draws(packed)
    assert weights.sum(-1).tolist() == pytest.approx([1] * 30, abs=1e-6)
    for tokens, shares in zip(ids, weights, strict=True):
        weighing = tokens[shares > 0].tolist()
        assert len(weighing) == len(set(weighing)) and set(weighing) == set(tokens.tolist())
        counted = [(tokens == token).sum().item() / 40 for token in weighing]
        assert shares[shares > 0].tolist() == pytest.approx(counted)
    wanted = [sum(p * math.log(p) for p in row) for row in _said(30, 300).double().exp().tolist()]
    assert negative_entropy.tolist() == pytest.approx(wanted, rel=1e-5)


def test_draws_are_as_frequent_as_their_probability() -> None:
    said = _said(2, 12)
    k = 20_000
    ids, weights, _ = teacher_cache.unpack_draws(teacher_cache.pack_draws(said, _uniform(2, k)))
    found = torch.zeros(2, 12).scatter_add(1, ids, weights)
    p = said.exp()
    assert bool(((found - p).abs() <= 5 * (p * (1 - p) / k).sqrt() + 1e-6).all())


def test_tokens_that_cannot_be_are_not_drawn() -> None:
    logits = torch.zeros(1, 6)
    logits[0, [0, 3, 5]] = -torch.inf
    ends = torch.tensor([[0.0, 1 / 3, 2 / 3, 1 - 2**-53]], dtype=torch.float64)
    ids, _, negative_entropy = teacher_cache.unpack_draws(teacher_cache.pack_draws(logits.log_softmax(-1), ends))
    assert set(ids.flatten().tolist()) == {1, 2, 4}
    assert negative_entropy.item() == pytest.approx(-math.log(3))


def test_draws_estimate_the_divergence_and_its_gradient_without_bias() -> None:
    """1,000 teachers that say the same, 8 draws each: their mean is within five standard errors."""
    temperature, times, vocabulary = 1.7, 1000, 40
    logits = 2 * torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(1))
    teacher = _said(1, vocabulary)
    packed = teacher_cache.pack_draws(teacher.expand(times, -1), _uniform(times, 8))
    said = SampledTokens(teacher_cache.unpack_draws(packed), vocabulary, temperature)
    student = logits.expand(times, -1).clone().requires_grad_()
    estimates = torch.stack(
        [said.loss(student[i : i + 1], *(t[i : i + 1] for t in said.tensors)) for i in range(times)]
    )
    (gradients,) = torch.autograd.grad(estimates.sum(), student)
    own = logits.clone().requires_grad_()
    wanted = forward_kl(log_probs(own, temperature), teacher) * temperature**2
    (gradient,) = torch.autograd.grad(wanted, own)
    error = estimates.detach().std() / times**0.5
    assert abs(estimates.mean() - wanted) < 5 * error and error < 0.1 * wanted
    p = teacher[0].exp()
    assert bool(((gradients.mean(0) - gradient[0]).abs() <= 5 * temperature * (p * (1 - p) / 8 / times).sqrt()).all())


def test_a_head_that_is_padded_beyond_the_known_tokens() -> None:
    teacher, k = _said(4, 50), 6
    packed = teacher_cache.pack_likeliest(teacher, k=k, dtype="float32")
    likeliest = TopTokens(teacher_cache.unpack_likeliest(packed), 50, DistillConfig(), 1.0)
    drawn = SampledTokens(teacher_cache.unpack_draws(teacher_cache.pack_draws(teacher, _uniform(4, k))), 50, 1.0)
    logits = _said(4, 64, seed=3)
    for signal in (likeliest, drawn):
        short = signal.loss(logits[:, :50], *signal.tensors)
        assert float(signal.loss(logits, *signal.tensors)) == float(short) > 0
