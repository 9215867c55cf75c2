from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.planning.counters import DispatchMode


class Names(DispatchMode):
    """Of what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.found.append(str(func))
        return self.computed(func, args, kwargs) * 1


def test_every_operation_is_handed_over_once_and_those_inside_are_not() -> None:
    names = [f"aten.{name}" for name in ("add.Tensor", "exp.default", "sum.default")]
    ones = torch.ones(3)
    with Names() as outer, Names() as inner:
        total = (ones + 1).exp().sum()
    assert inner.found == names
    assert outer.found == names
    assert torch.allclose(total, 3 * torch.tensor(2.0).exp())


def test_another_is_asked_again_when_the_inner_is_left_by_an_error() -> None:
    with Names() as outer:
        with pytest.raises(ValueError, match="enough"), Names() as inner:
            torch.ones(3).exp()
            raise ValueError("enough")
        torch.ones(3).sin()
    torch.ones(3).cos()
    assert inner.found == ["aten.ones.default", "aten.exp.default"]
    assert outer.found == [*inner.found, "aten.ones.default", "aten.sin.default"]


class _Foreign(TorchDispatchMode):
    """A mode of torch's own kind."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_modes_of_others_between_are_kept() -> None:
    with Names() as outer, _Foreign(), Names() as inner:
        torch.zeros(2)
    assert inner.found == ["aten.zeros.default"]
    assert outer.found == ["aten.zeros.default", "aten.mul.Tensor"]
