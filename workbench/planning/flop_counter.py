"""Floating-point operations of what is computed, as torch counts them for each kernel."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from workbench.planning.dispatch_mode import DispatchMode


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Scores, and their products with the values, of every head of the query: it may have more than its keys.

    Torch's own formula refuses that up to 2.11, and knows no CPU's kernel. Masked scores count, too.
    """
    return 2 * query[..., 0].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Scores again, their gradients, and those of query, key and value."""
    return 2 * query[..., 0].numel() * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1])


_KERNELS = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
_aten = torch.ops.aten
_FORMULAS: dict[Any, Callable[..., int]] = {
    # Torch knows these two only where they write elsewhere.
    _aten.addmm_: flop_registry[_aten.addmm],
    _aten.baddbmm_: flop_registry[_aten.baddbmm],
    **flop_registry,
    **{getattr(_aten, f"_scaled_dot_product_{name}"): _attention for name in _KERNELS},
    **{getattr(_aten, f"_scaled_dot_product_{name}_backward"): _attention_backward for name in _KERNELS},
}
_QUANTISED = {f"bitsandbytes.{name}" for name in ("gemm_4bit", "gemv_4bit", "int8_linear_matmul", "int8_scaled_mm")}
"""Products with packed weights, by name: importing bitsandbytes takes a second."""


@cache
def _formula(func: Any) -> Callable[..., int] | None:
    """From a kernel's arguments and result to its floating-point operations: two for a multiplication and addition."""
    if str(func.overloadpacket) in _QUANTISED:
        return _packed_product
    return _FORMULAS.get(func.overloadpacket)


def _packed_product(inputs: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    return 2 * out_val.numel() * inputs.shape[-1]


class Operations(DispatchMode):
    """Inside of it, operations are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self._known: dict[Hashable, int] = {}

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = self.computed(func, args, kwargs)
        if (formula := _formula(func)) is not None:
            key = (func, _shapes(args), _shapes((*kwargs, *kwargs.values())), _shapes((result,)))
            if key not in self._known:
                self._known[key] = int(formula(*args, **kwargs, out_val=result))
            self.count += self._known[key]
        return result


def _shapes(values: Sequence[Any]) -> tuple[Hashable, ...]:
    """All that a formula looks at: shapes of tensors, in nested lists too, and numbers."""
    return tuple(
        each.shape if isinstance(each, Tensor) else _shapes(each) if isinstance(each, (list, tuple)) else each
        for each in values
    )
