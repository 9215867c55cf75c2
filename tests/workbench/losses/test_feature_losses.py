"""Distances of inner states against their definitions, written with loops over real tokens, and what they ignore."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from workbench.losses.feature_losses import attention, hidden_cosine, hidden_mse, relation

Distance = Callable[[Tensor, Tensor, Tensor], Tensor]

LENGTHS = (5, 3)
MASK = torch.arange(5) < torch.tensor(LENGTHS)[:, None]
DISTANCES: dict[str, Distance] = {
    "hidden_mse": hidden_mse,
    "hidden_cosine": hidden_cosine,
    "relation": partial(relation, heads=2),
    "attention": attention,
}
each = pytest.mark.parametrize("name", DISTANCES)


def _states(seed: int, *, width: int = 6) -> Tensor:
    return torch.randn(2, 5, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _scores(seed: int) -> Tensor:
    return torch.randn(2, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _sides(name: str) -> tuple[Tensor, Tensor]:
    make = _scores if name == "attention" else _states
    return make(1), make(0)


def _mse(student: Tensor, teacher: Tensor, length: int) -> float:
    return sum(float((student[i] - teacher[i]) @ (student[i] - teacher[i])) / 6 for i in range(length)) / length


def _cosine(student: Tensor, teacher: Tensor, length: int) -> float:
    return (
        sum(1 - float(student[i] @ teacher[i] / (student[i].norm() * teacher[i].norm())) for i in range(length))
        / length
    )


def _relation(student: Tensor, teacher: Tensor, length: int) -> float:
    total = 0.0
    for head in range(2):
        for i in range(length):
            sides = []
            for states in (student, teacher):
                width = states.shape[1] // 2
                part = states[:length, head * width : (head + 1) * width]
                sides.append(
                    torch.tensor([float(part[i] @ part[j]) / math.sqrt(width) for j in range(length)]).softmax(0)
                )
            total += sum(float(p * (p / q).log()) for q, p in zip(*sides, strict=True))
    return total / (2 * length)


def _attention(student: Tensor, teacher: Tensor, length: int) -> float:
    pairs = [(h, i, j) for h in range(3) for i in range(length) for j in range(length)]
    return sum(float(student[pair] - teacher[pair]) ** 2 for pair in pairs) / len(pairs)


DEFINED = {"hidden_mse": _mse, "hidden_cosine": _cosine, "relation": _relation, "attention": _attention}


@each
def test_equals_its_definition(name: str) -> None:
    student, teacher = _sides(name)
    wanted = [DEFINED[name](student[row], teacher[row], length) for row, length in enumerate(LENGTHS)]
    assert DISTANCES[name](student, teacher, MASK).tolist() == pytest.approx(wanted, rel=1e-5)


@each
def test_gradient(name: str) -> None:
    student, teacher = _sides(name)
    assert torch.autograd.gradcheck(lambda states: DISTANCES[name](states, teacher, MASK), student.requires_grad_())


@each
def test_zero_where_they_agree_and_nowhere_below(name: str) -> None:
    student, teacher = _sides(name)
    found = DISTANCES[name](student.requires_grad_(), student.detach().clone(), MASK)
    (gradient,) = torch.autograd.grad(found.sum(), student)
    torch.testing.assert_close(
        (found, gradient), (torch.zeros_like(found), torch.zeros_like(gradient)), atol=1e-14, rtol=0
    )
    assert (DISTANCES[name](student, teacher, MASK) > 0.01).all()


@each
@pytest.mark.parametrize("filling", [7.0, math.nan])
def test_padding_does_not_matter(name: str, filling: float) -> None:
    """Nor has it a gradient; and a row of nothing else gives 0."""
    student, teacher = _sides(name)
    mask = MASK.clone()
    mask[0] = False
    real = (mask[:, None, :, None] & mask[:, None, None, :]) if name == "attention" else mask[..., None]
    wanted = DISTANCES[name](student, teacher, mask)
    filled = student.masked_fill(~real, filling).requires_grad_()
    found = DISTANCES[name](filled, teacher.masked_fill(~real, -filling), mask)
    (gradient,) = torch.autograd.grad(found.sum(), filled)
    assert torch.equal(found, wanted) and found[0] == 0 and found[1] > 0
    assert gradient.isfinite().all() and not gradient.masked_select(~real).any()


@each
def test_low_precision_is_widened(name: str) -> None:
    sides = [side.bfloat16() for side in _sides(name)]
    found = DISTANCES[name](*sides, MASK)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, DISTANCES[name](*(side.float() for side in sides), MASK))


def test_relation_sees_how_tokens_stand_to_each_other_and_not_where() -> None:
    """Turning one head's space changes nothing; turning both heads' together does."""
    student, teacher = _sides("relation")
    turn = torch.linalg.qr(_states(2)[0, :3, :3]).Q
    whole = torch.linalg.qr(torch.cat([_states(3)[0], _states(4)[0, :1]])).Q
    wanted = relation(student, teacher, MASK, heads=2)
    turned = torch.cat([student[..., :3] @ turn, student[..., 3:]], -1)
    torch.testing.assert_close(relation(turned, teacher, MASK, heads=2), wanted)
    assert not torch.allclose(relation(student @ whole, teacher, MASK, heads=2), wanted, rtol=1e-3)


def test_relation_goes_between_widths() -> None:
    student, teacher = _states(1, width=4), _states(0, width=10)
    wanted = [_relation(student[row], teacher[row], length) for row, length in enumerate(LENGTHS)]
    assert relation(student, teacher, MASK, heads=2).tolist() == pytest.approx(wanted, rel=1e-5)


def test_cosine_does_not_see_lengths() -> None:
    student, teacher = _sides("hidden_cosine")
    torch.testing.assert_close(hidden_cosine(3 * student, teacher, MASK), hidden_cosine(student, teacher, MASK))
