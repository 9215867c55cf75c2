from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from workbench.planning.dispatch_mode import DispatchMode


class Names(DispatchMode):
    """Of what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.found.append(str(func))
        return func(*args, **kwargs) * 1


def test_every_operation_is_handed_over_once_and_those_inside_are_not() -> None:
    names = [f"aten.{name}" for name in ("add.Tensor", "exp.default", "sum.default")]
    ones = torch.ones(3)
    with Names() as outer, Names() as inner:
        total = (ones + 1).exp().sum()
    assert inner.found == names
    assert outer.found == [called for name in names for called in (name, "aten.mul.Tensor")]
    assert torch.allclose(total, 3 * torch.tensor(2.0).exp())
