"""Calls of kernels, as they are noted where tensors have numbers or none, and can be done again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from workbench.planning.dispatch_mode import DispatchMode
from workbench.planning.flop_counter import flops


class Like(NamedTuple):
    """What a tensor is, without its numbers."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Like:
        """What this one is."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)

    @property
    def bytes(self) -> int:
        """Of its storage."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize


@dataclass(frozen=True)
class Kernel:
    """An operation, and all of its arguments that decide how long it takes."""

    operation: OpOverload[..., Any]
    leaves: tuple[Hashable, ...]
    """Its arguments: `Like` for a tensor, the type of a number with a fraction, anything else itself."""
    given: tuple[Any, ...] = field(compare=False)
    """The same once, with what they were: real numbers of indices, fractions."""
    form: TreeSpec = field(compare=False)
    flops: int = field(compare=False)
    written: int = field(compare=False)
    """Bytes of the results."""

    @cached_property
    def bytes(self) -> int:
        """Read and written; of a table at most as many are read as are written."""
        read = sum(leaf.bytes for leaf in self.leaves if isinstance(leaf, Like))
        return self.written + (min(read, self.written) if self.operation in _LOOKUPS else read)

    @property
    def is_view(self) -> bool:
        """Whether nothing is computed."""
        return bool(self.operation.is_view)

    def arguments(self, made: Callable[[Like, int], Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What to call the operation with.

        Args:
            made: Gives a tensor like this, the n-th (from 0) of its kind among the arguments.
        """
        seen: dict[Like, int] = {}
        leaves = []
        for leaf in self.given:
            if isinstance(leaf, Like):
                number = seen[leaf] = seen.get(leaf, -1) + 1
                leaf = made(leaf, number)
            leaves.append(leaf)
        arguments, named = tree_unflatten(leaves, self.form)
        return arguments, named


class Kernels(DispatchMode):
    """Inside of it, every call of a kernel is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Kernel] = []
        self._same: dict[Kernel, Kernel] = {}

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if func.namespace != "prim":
            leaves, form = tree_flatten((tuple(args), dict(kwargs)))
            kernel = Kernel(
                operation=func,
                leaves=tuple(map(_key, leaves)),
                given=tuple(map(_given, leaves)),
                form=form,
                flops=flops(func, args, kwargs, result),
                written=sum(Like.of(leaf).bytes for leaf in tree_leaves(result) if isinstance(leaf, Tensor)),
            )
            self.calls.append(self._same.setdefault(kernel, kernel))  # alike blocks call alike kernels
        return result


_LOOKUPS = (
    torch.ops.aten.embedding.default,
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_select.default,
    torch.ops.aten.gather.default,
)


def _key(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return Like.of(leaf)
    return float if isinstance(leaf, float) else leaf


def _given(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    # Which rows of a table are read matters; other numbers do not.
    known = not isinstance(leaf, FakeTensor) and not leaf.is_floating_point()
    return leaf if known else Like.of(leaf)
