"""Floating-point operations of what is computed, as torch counts them for each kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula, sdpa_backward_flop_count, sdpa_flop_count

from workbench.planning.dispatch_mode import DispatchMode

_CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

if _CPU_ATTENTION not in flop_registry:  # torch knows the kernels of other devices only

    @register_flop_formula(_CPU_ATTENTION)
    def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_flop_count(query, key, value))

    @register_flop_formula(_CPU_ATTENTION_BACKWARD)
    def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_backward_flop_count(grad, query, key, value))


# Torch knows these two only where they write elsewhere.
flop_registry.setdefault(torch.ops.aten.addmm_, flop_registry[torch.ops.aten.addmm])
flop_registry.setdefault(torch.ops.aten.baddbmm_, flop_registry[torch.ops.aten.baddbmm])

_QUANTISED = {f"bitsandbytes.{name}" for name in ("gemm_4bit", "gemv_4bit", "int8_linear_matmul", "int8_scaled_mm")}
"""Products with packed weights, by name: importing bitsandbytes takes a second."""


def flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Floating-point operations of a kernel's call: two for a multiplication and addition."""
    if str(func.overloadpacket) in _QUANTISED:
        return 2 * int(result.numel()) * int(args[0].shape[-1])
    formula: Callable[..., int] | None = flop_registry.get(func.overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


class Operations(DispatchMode):
    """Inside of it, operations are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = func(*args, **kwargs)
        self.count += flops(func, args, kwargs, result)
        return result
