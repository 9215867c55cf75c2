"""The distance between vocabularies against its definition, and what it must not see."""

from __future__ import annotations

import math

import pytest
import torch

from tests.workbench.losses.test_divergences import random_logits
from workbench.losses.universal_logit import universal

T = 1.7


def _probabilities(logits: list[float]) -> list[float]:
    raised = [math.exp(logit / T) for logit in logits]
    return sorted((each / sum(raised) for each in raised), reverse=True)


@pytest.mark.parametrize(("ours", "theirs"), [(5, 5), (4, 7), (7, 4)])
def test_equals_its_definition(ours: int, theirs: int) -> None:
    student, teacher = random_logits(3, ours, seed=1), random_logits(3, theirs)
    wanted = 0.0
    for q, p in zip(student.tolist(), teacher.tolist(), strict=True):
        q, p = _probabilities(q), _probabilities(p)
        size = max(ours, theirs)
        wanted += sum(abs(a - b) for a, b in zip(q + [0] * (size - ours), p + [0] * (size - theirs), strict=True))
    assert float(universal(student, teacher, temperature=T)) == pytest.approx(T * wanted, rel=1e-12)


def test_gradient() -> None:
    student, teacher = random_logits(3, 5, seed=1).requires_grad_(), random_logits(3, 7)
    assert torch.autograd.gradcheck(lambda logits: universal(logits, teacher, temperature=T), student)


def test_which_token_it_is_does_not_matter() -> None:
    student, teacher = random_logits(3, 5, seed=1), random_logits(3, 7)
    wanted = universal(student, teacher, temperature=T)
    torch.testing.assert_close(universal(student[:, [3, 0, 4, 1, 2]], teacher, temperature=T), wanted)
    torch.testing.assert_close(universal(student, teacher[:, [6, 0, 2, 5, 1, 3, 4]], temperature=T), wanted)


def test_tokens_without_mass_do_not_matter() -> None:
    student, teacher = random_logits(3, 5, seed=1), random_logits(3, 5)
    more = torch.cat([torch.full((3, 4), -torch.inf), teacher], 1)
    torch.testing.assert_close(universal(student, more, temperature=T), universal(student, teacher, temperature=T))


def test_zero_where_they_agree() -> None:
    student = random_logits(3, 5).requires_grad_()
    value = universal(student, student.detach().clone(), temperature=T)
    (gradient,) = torch.autograd.grad(value, student)
    torch.testing.assert_close(
        (value, gradient), (torch.zeros_like(value), torch.zeros_like(gradient)), atol=1e-14, rtol=0
    )
    assert universal(student, random_logits(3, 5, seed=1), temperature=T) > 0.1


def test_the_gradients_size_does_not_depend_on_the_temperature() -> None:
    student, teacher = random_logits(3, 5, seed=1).requires_grad_(), random_logits(3, 5)
    at = {t: torch.autograd.grad(universal(student, teacher, temperature=t), student)[0] for t in (50.0, 200.0)}
    assert float((at[50.0] - at[200.0]).norm() / at[200.0].norm()) < 0.05
