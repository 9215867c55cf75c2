"""Weights of packed layers as numbers; bitsandbytes' bit for bit those that it multiplies with in training on a CPU.

Legend: N tokens, I inputs, O outputs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.adapters.precision.fp8_layers import Fp8Linear

CHUNK, LARGE_CHUNK = 2**18, 2**26
"""Elements of an 8-bit weight that are scaled in float32 at a time: 1 MB, which stays in a core's cache; and 256 MB."""


def is_quantised(layer: nn.Module) -> bool:
    """Whether the weight of a layer is packed."""
    stored = getattr(layer, "weight", None)
    if isinstance(layer, Fp8Linear):
        return True
    return isinstance(stored, Tensor) and (stored.dtype == torch.int8 or _quant_state(layer) is not None)


def dequantised(layer: Any, dtype: torch.dtype) -> Tensor:
    """The weight (O, I) of a quantised layer, in a new tensor of `dtype`.

    4 bits are bitsandbytes' own kernel. 8 bits are v s / 127, computed in float32, with the largest value s of each
    output: bitsandbytes multiplies a half-precision matrix with a float32 column, an operation of mixed types that
    torch does not vectorise. On one core of an AMD EPYC, for 2,048 x 2,048 weights: 24.0 ms, and so 2.2.
    """
    stored = layer.weight
    if isinstance(layer, Fp8Linear):
        return layer.dense(dtype)
    if stored.dtype != torch.int8:
        from bitsandbytes.functional import dequantize_4bit  # a second to import, and most runs need none of it

        four: Tensor = dequantize_4bit(stored.data, _quant_state(layer))
        return four.to(dtype)
    largest_O = layer.state.SCB if stored.SCB is None else stored.SCB  # the first forward pass moves them
    scale_O1 = largest_O[:, None] * (1.0 / 127.0)
    eight = torch.empty(stored.shape, dtype=dtype, device=stored.device)
    outputs = max(1, (CHUNK if stored.device.type == "cpu" else LARGE_CHUNK) // stored.shape[1])
    for chunk, values, scale in zip(
        eight.split(outputs), stored.data.split(outputs), scale_O1.split(outputs), strict=True
    ):
        chunk.copy_(values.to(torch.float32).mul_(scale))
    return eight


def _quant_state(layer: Any) -> Any:
    """How a 4-bit weight was packed; one that processes share loses it whenever it is gathered, its layer does not."""
    return getattr(layer.weight, "quant_state", None) or getattr(layer, "quant_state", None)


class LatestWeight:
    """The weight of the quantised layer that was asked for last, dequantised once for all members of a bank.

    Their products with a layer follow one another, in the forward pass and in the backward pass alike, so that keeping
    the weight of the latest layer alone is enough, and never holds two.
    """

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


def share_latest(model: nn.Module, latest: LatestWeight) -> None:
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
