"""Grouped products against one product after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.workbench.training.fake_cuda import CUDA, fake_cuda
from workbench.adapters.precision.grouped_products import KernelGroups, PaddedGroups, RowGroups, fastest

SIZES = (5, 1, 12, 7)
KINDS = pytest.mark.parametrize("kind", [KernelGroups, PaddedGroups])


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@KINDS
@pytest.mark.parametrize("sizes", [SIZES, (4, 4, 4)])
def test_products_are_those_of_each_group_alone(kind: type[RowGroups], sizes: tuple[int, ...]) -> None:
    groups, left, right = kind(sizes, torch.device("cpu")), drawn(sum(sizes), 16), drawn(sum(sizes), 8)
    weight = drawn(len(sizes), 16, 8)
    wanted = torch.cat([rows @ each for rows, each in zip(left.split(sizes), weight, strict=True)])
    found = groups.joined(groups.product(groups.spread(left), weight))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    outer = torch.stack([a.T @ b for a, b in zip(left.split(sizes), right.split(sizes), strict=True)])
    found = groups.outer(groups.cleared(groups.spread(left).clone()), groups.spread(right))
    torch.testing.assert_close(found, outer, rtol=1e-5, atol=1e-5)


@KINDS
def test_infinities_of_a_group_stay_with_it(kind: type[RowGroups]) -> None:
    groups, left, right = kind(SIZES, torch.device("cpu")), drawn(25, 16), drawn(25, 8)
    left[5:6], right[5:6] = torch.inf, torch.nan
    others = [0, 2, 3]
    spread, beside = groups.cleared(groups.spread(left).clone()), groups.spread(right)
    assert groups.outer(spread, beside)[others].isfinite().all()
    product = groups.joined(groups.product(groups.spread(left), drawn(4, 16, 8)))
    assert product[[row for row in range(25) if row != 5]].isfinite().all()


def test_the_choice_is_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fastest(torch.zeros(25, 16), SIZES, outputs=16) is None, "launches cost a CPU nothing"
    with fake_cuda(monkeypatch):
        rows, narrow = torch.zeros(25, 16, device=CUDA, dtype=torch.bfloat16), torch.zeros(25, 12, device=CUDA)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        for capability, wanted in (((8, 9), PaddedGroups), ((9, 0), KernelGroups), ((10, 0), KernelGroups)):
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
            assert fastest(rows, SIZES, outputs=16) is wanted
            assert fastest(rows.float(), SIZES, outputs=16) is fastest(narrow, SIZES, outputs=16) is PaddedGroups
        assert fastest(narrow, (1, 1, 100), outputs=16) is None, "filled up they would be thrice as many rows"
