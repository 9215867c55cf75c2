"""Sharpness-aware gradients, and Lookahead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.workbench.training.freezing.fits import assert_same_bits, build, configured, interrupted, train
from workbench.config.sections.optimizer_config import OptimizerConfig
from workbench.training.master_weights import MasterWeights
from workbench.training.optim.own_optimizers import look_ahead
from workbench.training.optim.sharpness_aware import Sharpness, ascended


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.Parameter(torch.randn(3, 4, generator=generator, dtype=torch.float64))
        self.second = nn.Parameter(torch.randn(5, generator=generator, dtype=torch.float64))

    def loss(self) -> Tensor:
        return self.first.pow(4).sum() + (self.second * self.first[0, 0]).cos().sum()


def _flat(model: Model, *, gradients: bool = False) -> Tensor:
    parts = [each.grad if gradients else each.detach() for each in (model.first, model.second)]
    return torch.cat([each.flatten().clone() for each in parts if each is not None])


def _gradient(at: Tensor) -> Tensor:
    model = Model()
    with torch.no_grad():
        model.first.copy_(at[:12].view(3, 4))
        model.second.copy_(at[12:])
    model.loss().backward()  # type: ignore[no-untyped-call]
    return _flat(model, gradients=True)


def test_steps_between_reuse_what_was_orthogonal_to_the_gradient() -> None:
    """Liu et al. 2022, algorithm 1, with plain gradient descent, SAM in steps 0 and 3."""
    model, rho, alpha = Model(), 0.05, 0.7
    settings = OptimizerConfig(sam=rho, sam_every=3, sam_reuse=alpha)
    values = MasterWeights(model, torch.float64)
    sharpness, w, v = Sharpness(settings, values), _flat(model), torch.zeros(17)
    for step in range(5):
        model.zero_grad()
        model.loss().backward()  # type: ignore[no-untyped-call]
        sharpness.sharpen(step, lambda: model.loss().backward())  # type: ignore[no-untyped-call]
        g = _gradient(w)
        if step % 3 == 0:
            s = _gradient(w + rho * g / g.norm())
            v, wanted = s - g * (g @ s) / (g @ g), s
        else:
            wanted = g + alpha * g.norm() / v.norm() * v
        torch.testing.assert_close(_flat(model, gradients=True), wanted)
        with torch.no_grad():
            for each in (model.first, model.second):
                each -= 1e-3 * each.grad  # type: ignore[operator]
        w = w - 1e-3 * wanted


@pytest.mark.parametrize("gradient", [0.0, 1.0])
def test_nothing_is_added_where_nothing_was_orthogonal(gradient: float) -> None:
    model = Model()
    sharpness = Sharpness(OptimizerConfig(sam=0.1, sam_every=2, sam_reuse=0.7), MasterWeights(model, torch.float64))

    def again() -> None:
        for each in (model.first, model.second):
            each.grad = torch.full_like(each, gradient)

    again()
    sharpness.sharpen(0, again)
    again()
    sharpness.sharpen(1, again)
    assert bool((_flat(model, gradients=True) == gradient).all())


LOOK: dict[str, Any] = {"optimizer": {"sam": 0.05, "sam_every": 3, "sam_reuse": 0.7}}


def test_it_resumes_to_the_same_bits_and_does_not_depend_on_micro_batches(tmp_path: Path) -> None:
    """Stopped between two steps that use SAM."""
    model = build("Llama", blocks=2)
    whole = train(model, configured(**LOOK), tmp_path / "whole")
    assert_same_bits(interrupted(model, configured(**LOOK), tmp_path / "parts", after=2), whole)
    small = train(model, configured(**LOOK, batch={"tokens_per_device": 20}), tmp_path / "small")
    assert small.losses == pytest.approx(whole.losses, rel=1e-5)
    without = {"optimizer": {"sam": 0.05, "sam_every": 3}}
    plain = train(model, configured(**without), tmp_path / "plain")
    assert plain.losses[:2] == whole.losses[:2] and plain.losses[2:] != whole.losses[2:], "the second step reuses"


def nothing() -> None:
    """No copies to refresh."""


@pytest.fixture
def points() -> Iterator[list[nn.Parameter]]:
    """A matrix, a vector, and one that the loss does not depend on."""
    generator = torch.Generator().manual_seed(0)
    yield [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 4), (5,), (2,))]


def _loss(points: list[nn.Parameter]) -> Tensor:
    return points[0].pow(4).sum() + points[1].cos().sum()


# ---- SAM


def test_the_gradient_is_taken_uphill(points: list[nn.Parameter]) -> None:
    """Foret et al. 2021, equations 2 and 3: the gradient at w + rho g / |g|."""
    before = [point.detach().clone() for point in points]
    g = torch.autograd.grad(_loss(points), points[:2])
    norm = (g[0].square().sum() + g[1].square().sum()).sqrt()
    uphill = [(w + 0.1 * each / norm).requires_grad_() for w, each in zip(before, g, strict=False)]
    expected = torch.autograd.grad(uphill[0].pow(4).sum() + uphill[1].cos().sum(), uphill)

    _loss(points).backward()
    with ascended(points, rho=0.1, refresh=nothing):
        assert all(point.grad is None for point in points)
        moved = sum((point - w).square().sum() for point, w in zip(points, before, strict=True))
        assert isinstance(moved, Tensor) and moved.sqrt().item() == pytest.approx(0.1, rel=1e-5)
        _loss(points).backward()
    for point, w, wanted in zip(points, before, expected, strict=False):
        assert torch.equal(point, w)
        torch.testing.assert_close(point.grad, wanted)
    assert points[2].grad is None and torch.equal(points[2], before[2])


def test_adaptive_it_goes_further_along_larger_weights(points: list[nn.Parameter]) -> None:
    """Kwon et al. 2021: w + rho T^2 g / |T g|, which the scale of a weight does not change but for T's constant."""
    before = [point.detach().clone() for point in points]
    _loss(points).backward()
    sizes = [value.abs() + 0.01 for value in before[:2]]
    scaled = [size * point.grad for size, point in zip(sizes, points, strict=False) if point.grad is not None]
    norm = torch.cat([each.flatten() for each in scaled]).norm()
    wanted = [w + 0.5 * size * each / norm for w, size, each in zip(before, sizes, scaled, strict=False)]
    with ascended(points, rho=0.5, refresh=nothing, adaptive=True):
        for point, there in zip(points, wanted, strict=False):
            torch.testing.assert_close(point.detach(), there)
    assert all(torch.equal(point, w) for point, w in zip(points, before, strict=True))


def test_the_weights_come_back_whatever_happens(points: list[nn.Parameter]) -> None:
    before = [point.detach().clone() for point in points]
    _loss(points).backward()
    with pytest.raises(torch.OutOfMemoryError), ascended(points, rho=0.1, refresh=nothing):
        raise torch.OutOfMemoryError
    assert all(torch.equal(point, w) for point, w in zip(points, before, strict=True))


@pytest.mark.parametrize("gradient", [0.0, float("nan")])
def test_no_way_is_uphill_of_a_flat_or_broken_place(gradient: float) -> None:
    point = nn.Parameter(torch.ones(3))
    point.grad = torch.full((3,), gradient)
    with ascended([point], rho=0.1, refresh=nothing):
        assert point.isnan().all() if gradient else torch.equal(point, torch.ones(3))
    assert torch.equal(point, torch.ones(3))


def test_half_precision_computes_uphill_and_then_where_it_was() -> None:
    model = nn.Linear(2, 1, bias=False)
    masters = MasterWeights(model, torch.bfloat16)
    (master,) = masters
    before = model.weight.detach().clone()
    master.grad = torch.tensor([[3.0, 4.0]])
    with ascended(masters, rho=1.0, refresh=masters.refresh):
        torch.testing.assert_close(model.weight.float(), master + 0, rtol=1e-2, atol=1e-2)
        assert not torch.equal(model.weight, before)
    assert torch.equal(model.weight, before)


# ---- Lookahead


def test_slow_weights_follow_the_fast_ones() -> None:
    """Zhang et al. 2019, algorithm 1."""
    fast = nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))
    optimizer = torch.optim.SGD([fast], lr=0.1, momentum=0.5)
    look_ahead(optimizer, every=3, alpha=0.4)
    slow = theta = fast.detach().clone()
    b = torch.zeros(3, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 11):
        g = torch.randn(3, generator=generator, dtype=torch.float64)
        fast.grad = g.clone()
        optimizer.step()
        b = 0.5 * b + g
        theta = theta - 0.1 * b
        if step % 3 == 0:
            slow = slow + 0.4 * (theta - slow)
            theta = slow
        torch.testing.assert_close(fast.detach(), theta)


def test_all_the_way_is_no_lookahead() -> None:
    ends = []
    for alpha in (None, 1.0):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(4))
        optimizer = torch.optim.AdamW([weight], lr=0.1)
        if alpha is not None:
            look_ahead(optimizer, every=2, alpha=alpha)
        for _ in range(5):
            weight.grad = torch.randn(4)
            optimizer.step()
        ends.append(weight.detach())
    torch.testing.assert_close(ends[0], ends[1])


def test_who_joins_late_begins_where_it_stands() -> None:
    early, late = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([early, late], lr=1.0)
    look_ahead(optimizer, every=2, alpha=0.5)
    for step in range(4):
        early.grad = torch.ones(2)
        late.grad = torch.ones(2) if step >= 2 else None
        optimizer.step()
    assert torch.equal(early, torch.full((2,), -2.0))  # twice two steps, and half the way back
    assert torch.equal(late, torch.zeros(2))  # one less than where two steps lead from 1, half the way back
