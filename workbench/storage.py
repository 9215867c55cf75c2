"""Half-precision weights computed in float32, for devices that would emulate half-precision products.

The frozen weights stay as they are in memory; each product converts the one matrix that it needs, in the
forward and again in the backward pass, so that no float32 copy outlives it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class StoredLinear(nn.Linear):
    """A frozen linear layer whose weight is stored in half precision and computed in the input's dtype."""

    def forward(self, input: Tensor) -> Tensor:
        if input.dtype == self.weight.dtype:
            return super().forward(input)
        bias = None if self.bias is None else self.bias.to(input.dtype)
        output: Tensor = _StoredProduct.apply(input, self.weight, bias)  # type: ignore[no-untyped-call]
        return output


class _StoredProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return F.linear(input, weight.to(input.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return grad @ weight.to(grad.dtype), None, None


def compute_in_float32(model: nn.Module) -> None:
    """Make every frozen linear layer and embedding of `model` give float32; other parameters become float32."""
    stored: set[int] = set()
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = StoredLinear
            stored.add(id(module.weight))
        elif isinstance(module, nn.Embedding):
            module.register_forward_hook(_to_float32)
            stored.add(id(module.weight))
    for parameter in model.parameters():
        if id(parameter) not in stored:
            parameter.data = parameter.data.float()
    for buffer in model.buffers():
        if buffer.dtype in (torch.bfloat16, torch.float16):
            buffer.data = buffer.data.float()


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters as stored, with the constants of quantised ones; tied weights count once."""
    total = 0
    for parameter in model.parameters():
        total += parameter.nbytes
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            total += sum(value.nbytes for value in state.as_dict(packed=True).values() if isinstance(value, Tensor))
        constants = getattr(parameter, "SCB", None)
        total += constants.nbytes if isinstance(constants, Tensor) else 0
    return total


def _to_float32(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
    return output.float()
