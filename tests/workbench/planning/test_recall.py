"""What is recalled of an operation is what torch would imagine again."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from workbench.planning.fake_tensors import fake_tensors, real_tensors

OPERATIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "product": lambda x, y: x @ y,
    "sum with a whole number": lambda x, y: x.int() + 1,
    "sum with a fraction": lambda x, y: x.int() + 1.0,
    "view": lambda x, y: x.view(2, 20).T[:, 1:],
    "several views": lambda x, y: x.split(2),
    "several results": lambda x, y: torch.max(x, dim=0),
    "precision": lambda x, y: (x.bfloat16() * y.T.half()[:, :1].bfloat16()).float(),
    "one of many": lambda x, y: torch.cat([x, x, y.T]),
    "in place": lambda x, y: x.add_(1).mul_(x),
    "another shape in place": lambda x, y: x.clone().t_(),
    "no copy": lambda x, y: x.contiguous(),
    "made of nothing": lambda x, y: torch.zeros(4, 10),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_same_again(name: str) -> None:
    operation = OPERATIONS[name]
    with FakeTensorMode():
        wanted = _described(operation)
    with fake_tensors():
        assert [_described(operation) for _ in range(3)] == [wanted] * 3


def _described(operation: Callable[[Tensor, Tensor], Any]) -> list[Any]:
    x, y = torch.empty(4, 10), torch.empty(10, 4)
    result = operation(x, y)
    tensors = [result] if isinstance(result, Tensor) else list(result)
    assert all(isinstance(each, FakeTensor) for each in tensors)
    storages = [each.untyped_storage()._cdata for each in (x, y, *tensors)]
    return [
        [(each.shape, each.stride(), each.storage_offset(), each.dtype, each.device) for each in tensors],
        [storages.index(each) for each in storages],
        [each is x for each in tensors],
        x.shape,
    ]


def test_what_is_made_of_nothing_has_the_precision_of_the_moment() -> None:
    with fake_tensors():
        made = [torch.zeros(3).dtype]
        torch.set_default_dtype(torch.bfloat16)
        try:
            made += [torch.zeros(3).dtype, (torch.empty(2, dtype=torch.int64) * 0.5).dtype]
        finally:
            torch.set_default_dtype(torch.float32)
        made += [torch.zeros(3).dtype, (torch.empty(2, dtype=torch.int64) * 0.5).dtype]
    assert made == [torch.float32, torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]


def test_what_is_made_while_tensors_are_real_is_real() -> None:
    with fake_tensors():
        before = torch.zeros(3)
        with real_tensors():
            within = torch.zeros(3)
            assert not isinstance(within, FakeTensor) and within.tolist() == [0, 0, 0]
        after = torch.zeros(3)
    assert isinstance(before, FakeTensor) and isinstance(after, FakeTensor)


def test_modules_are_copied() -> None:
    with fake_tensors():
        for _ in range(2):
            assert deepcopy(nn.LayerNorm(5)).weight.shape == (5,)


def test_gradients_are_those_of_the_first_time() -> None:
    found = []
    with fake_tensors():
        for _ in range(2):
            weight = torch.empty(5, 3, requires_grad=True)
            (torch.empty(7, 5) @ weight).relu().sum().backward()
            assert weight.grad is not None
            found.append((weight.grad.shape, weight.grad.stride(), weight.grad.dtype))
    assert found[0] == found[1] == (weight.shape, weight.stride(), weight.dtype)
