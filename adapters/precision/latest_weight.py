"""A quantised weight that several members of a bank multiply with, dequantised once for all of them.

Their products of a layer stand beside each other, in the forward pass and in the backward pass alike, so that keeping
the weight of the latest layer alone is enough, and never holds two.

Legend: N tokens, I inputs, O outputs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.adapters.precision.dequantised import dequantised, is_quantised


class LatestWeight:
    """The weight of the quantised layer that was asked for last, as numbers."""

    def __init__(self) -> None:
        self._stored: Tensor | None = None
        self._weight: Tensor | None = None

    def of(self, layer: Any, dtype: torch.dtype) -> Tensor:
        """The weight (O, I) of a layer; layers that have one stored weight share it. It is not to be changed."""
        if self._weight is not None and self._stored is layer.weight and self._weight.dtype == dtype:
            return self._weight
        self.clear()  # before another one is made
        self._stored, self._weight = layer.weight, dequantised(layer, dtype)
        return self._weight

    def clear(self) -> None:
        """Keep none."""
        self._stored = self._weight = None


def share(model: nn.Module, latest: LatestWeight) -> None:
    """Let the quantised layers of a member multiply with `latest` where they train on a CPU.

    Accelerators have bitsandbytes' kernels, which multiply with packed weights.
    """
    for module in model.modules():
        if type(module) in _kinds() and is_quantised(module) and module.weight.device.type == "cpu":
            module.__class__ = _kinds()[type(module)]
            module.latest = latest  # type: ignore[assignment]


@cache
def _kinds() -> dict[type[nn.Module], type[nn.Module]]:
    """Layers that share by those of bitsandbytes, where it can be imported."""
    try:
        # A second to import, and most runs need none of it.
        from bitsandbytes.nn.modules import Linear4bit, Linear8bitLt
    except ImportError:
        return {}
    return {kind: type(f"Shared{kind.__name__}", (SharingLayer, kind), {}) for kind in (Linear4bit, Linear8bitLt)}


class SharingLayer:
    """Mixed into a layer of bitsandbytes: its training pass over a shared weight, bit for bit its own."""

    latest: LatestWeight
    weight: Any

    def forward(self, x: Tensor) -> Tensor:
        layer: Any = self
        eight = layer.weight.dtype == torch.int8
        # 8-bit layers evaluate by a product of integers, and 4-bit ones by a kernel that reads packed weights.
        if not torch.is_grad_enabled() or (eight and not layer.training):
            whole: Any = super()
            output: Tensor = whole.forward(x)
            return output
        compute = x.dtype if eight or layer.compute_dtype is None else layer.compute_dtype
        bias = None if layer.bias is None else layer.bias.to(compute)
        product: Tensor = _Product.apply(x.to(compute), bias, layer, self.latest)  # type: ignore[no-untyped-call]
        return product.to(x.dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layer: nn.Module, latest: LatestWeight) -> Tensor:
        ctx.layer, ctx.latest = layer, latest
        return F.linear(x, latest.of(layer, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_grad = grad @ ctx.latest.of(ctx.layer, grad.dtype) if ctx.needs_input_grad[0] else None
        bias_grad = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return x_grad, bias_grad, None, None
