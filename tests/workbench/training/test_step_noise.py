"""Mixout: the law of its draws, its limits, and that everything comes back to the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from workbench.training.step_noise import Mixout


def values(*, moved: float = 1.0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(40, 50, generator=generator) * moved) for name in ("a", "b")}


def begun(rate: float, *, seed: int = 0) -> tuple[dict[str, nn.Parameter], dict[str, torch.Tensor], Mixout]:
    """Values away from their start, and the start."""
    found = values()
    start = {name: each.detach().clone() for name, each in found.items()}
    mixout = Mixout(found, rate=rate, seed=seed)
    for each in found.values():
        each.data += 0.5
    return found, start, mixout


def inside(mixout: Mixout, parameters: dict[str, nn.Parameter], step: int) -> torch.Tensor:
    with mixout.mixed(step, refresh=lambda: None):
        return parameters["a"].detach().clone()


def test_a_value_is_at_its_start_or_goes_further_and_is_its_own_on_average() -> None:
    found, start, mixout = begun(0.3)
    way = torch.stack([inside(mixout, found, step) for step in range(60)]) - start["a"]
    at_start = way.abs() < 1e-6
    torch.testing.assert_close(way[~at_start], torch.full_like(way[~at_start], 0.5 / 0.7), rtol=1e-4, atol=1e-6)
    count = at_start.numel()
    assert abs(at_start.float().mean() - 0.3) < 4 * (0.3 * 0.7 / count) ** 0.5
    assert abs(way.mean() - 0.5) < 0.01


def test_draws_are_of_seed_step_and_name_alone() -> None:
    found, _, mixout = begun(0.5)
    first = inside(mixout, found, 3)
    assert torch.equal(inside(mixout, found, 3), first) and not torch.equal(inside(mixout, found, 4), first)
    others, _, other = begun(0.5, seed=1)
    assert not torch.equal(inside(other, others, 3), first)
    with mixout.mixed(3, refresh=lambda: None):
        assert not torch.equal(found["a"] == values()["a"], found["b"] == values()["b"])


def test_values_come_back_to_the_same_bits_with_the_gradient_of_what_they_gave() -> None:
    found, start, mixout = begun(0.3)
    before, told = found["a"].detach().clone(), []
    with mixout.mixed(0, refresh=lambda: told.append(found["a"].detach().clone())):
        (found["a"] ** 2).sum().backward()
        mixed = found["a"].detach().clone()
    assert torch.equal(found["a"], before) and torch.equal(told[0], mixed) and torch.equal(told[1], before)
    goes = (mixed - start["a"]).abs() > 1e-6
    assert found["a"].grad is not None and found["b"].grad is None
    torch.testing.assert_close(found["a"].grad, 2 * mixed * goes / 0.7)
    with pytest.raises(RuntimeError, match="memory"), mixout.mixed(1, refresh=lambda: None):
        raise RuntimeError("out of memory")
    assert torch.equal(found["a"], before)


@pytest.mark.parametrize("frozen", [True, False])
def test_without_a_rate_at_the_start_and_where_it_is_frozen_a_value_computes_as_it_is(frozen: bool) -> None:
    found, _, mixout = begun(0.5 if frozen else 0.0)
    found["a"].requires_grad_(not frozen)
    assert torch.equal(inside(mixout, found, 0), found["a"])
    still = values()
    assert torch.equal(inside(Mixout(still, rate=0.9, seed=0), still, 0), still["a"])
