"""Sparse gradients with error feedback against the rule written a second time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.workbench.training.freezing.fits import assert_same_bits, build, configured, interrupted, train
from workbench.training.optim.own_optimizers import WAITING, apply_largest

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def points() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in ((3, 4), (5,))]


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 4), (5,))]


def test_the_largest_values_of_all_are_applied_and_the_rest_waits() -> None:
    """Stich et al. 2018, algorithm 1, over both parameters as one vector of 17 values, of which 3 are applied."""
    moved = points()
    optimizer = torch.optim.SGD(moved, lr=0.1)
    apply_largest(optimizer, share=3 / 17)
    x = torch.cat([each.detach().flatten() for each in moved])
    start, e, total = x.clone(), torch.zeros(17, dtype=torch.float64), torch.zeros(17, dtype=torch.float64)
    for step in range(7):
        for point, gradient in zip(moved, gradients(step), strict=True):
            point.grad = gradient
        g = torch.cat([each.flatten() for each in gradients(step)])
        optimizer.step()
        p = g + e
        kept = torch.zeros(17, dtype=torch.bool).scatter_(0, p.abs().topk(3).indices, True)
        x, e, total = x - 0.1 * p * kept, p * ~kept, total + g
        torch.testing.assert_close(torch.cat([each.detach().flatten() for each in moved]), x)
        waits = torch.cat([optimizer.state[each][WAITING].flatten() for each in moved])
        torch.testing.assert_close(waits, e)
        torch.testing.assert_close(start - x + 0.1 * waits, 0.1 * total, msg="nothing of a gradient is lost")


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    ],
)
def test_where_all_is_applied_nothing_changes(make: Make) -> None:
    ends = []
    for sparse in (False, True):
        moved = points()
        optimizer = make(moved)
        if sparse:
            apply_largest(optimizer, share=1.0)
        for step in range(5):
            for point, gradient in zip(moved, gradients(step), strict=True):
                point.grad = gradient
            optimizer.step()
        ends.append(moved)
    assert all(torch.equal(plain, sparse) for plain, sparse in zip(*ends, strict=True))


def test_values_as_large_as_the_smallest_are_applied_too() -> None:
    point = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([point], lr=1.0)
    apply_largest(optimizer, share=0.25)
    point.grad = torch.tensor([2.0, -2.0, 1.0, 0.0])
    optimizer.step()
    assert point.tolist() == [-2.0, 2.0, 0.0, 0.0]


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    first, second = points()
    optimizer = torch.optim.SGD([first, second], lr=1.0)
    apply_largest(optimizer, share=0.5)
    before = second.detach().clone()
    first.grad = gradients(0)[0]
    optimizer.step()
    assert torch.equal(second, before) and WAITING not in optimizer.state[second]


SPARSE: dict[str, Any] = {"optimizer": {"gradient_share": 0.1}}


def test_it_resumes_to_the_same_bits_and_does_not_depend_on_micro_batches(tmp_path: Path) -> None:
    model = build("Llama", blocks=2)
    whole = train(model, configured(**SPARSE), tmp_path / "whole")
    assert_same_bits(interrupted(model, configured(**SPARSE), tmp_path / "parts", after=3), whole)
    smaller = train(model, configured(**SPARSE, batch={"tokens_per_device": 20}), tmp_path / "small")
    assert smaller.losses == pytest.approx(whole.losses, rel=1e-5)
    dense = train(model, configured(), tmp_path / "dense")
    assert dense.losses != whole.losses
