"""Half-precision weights computed in another precision, for devices that would emulate half-precision products.

The frozen weights stay as they are in memory; each product converts the one matrix that it needs, in the
forward and again in the backward pass, so that no converted copy outlives it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

HALVES = (torch.bfloat16, torch.float16)


class StoredLinear(nn.Linear):
    """A linear layer whose weight is stored in half precision and computed in the input's dtype."""

    def forward(self, input: Tensor) -> Tensor:
        return _product(input, self.weight, self.bias)


class StoredConv1D(Conv1D):
    """GPT-2's linear layer, stored in half precision and computed in the input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return _product(x, self.weight.T, self.bias)


def _product(input: Tensor, weight_OI: Tensor, bias: Tensor | None) -> Tensor:
    bias = None if bias is None else bias.to(input.dtype)
    if weight_OI.dtype == input.dtype or weight_OI.requires_grad:
        return F.linear(input, weight_OI.to(input.dtype), bias)
    # As one matrix: with a bias, the product of more dimensions is a view, which nobody may change in place afterwards.
    output: Tensor = _StoredProduct.apply(input.flatten(0, -2), weight_OI, bias)  # type: ignore[no-untyped-call]
    return output.view(*input.shape[:-1], len(weight_OI))


class _StoredProduct(torch.autograd.Function):
    """Input (N, I), N positions, I inputs, O outputs; the weight has no gradient."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight_OI: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight_OI)
        return F.linear(input, weight_OI.to(input.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        (weight_OI,) = ctx.saved_tensors
        input_grad = grad @ weight_OI.to(grad.dtype) if ctx.needs_input_grad[0] else None
        return input_grad, None, grad.sum(0) if ctx.needs_input_grad[2] else None


_STORED: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: StoredLinear, Conv1D: StoredConv1D}


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Make every linear layer and embedding that is stored in half precision give `dtype`.

    Other floating-point parameters are converted; quantised ones are left alone.
    """
    stored: set[int] = set()
    for module in model.modules():
        if type(module) in _STORED:
            module.__class__ = _STORED[type(module)]
            stored.add(id(module.weight))
        elif isinstance(module, nn.Embedding):
            module.register_forward_hook(_Convert(dtype))
            stored.add(id(module.weight))
    for parameter in model.parameters():
        if id(parameter) not in stored and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    for buffer in model.buffers():
        if buffer.dtype in HALVES:
            buffer.data = buffer.data.to(dtype)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters as stored, with the constants of quantised ones; what is shared counts once."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in held(model)}.values())


def held(model: nn.Module) -> Iterator[Tensor]:
    """All parameters as stored, with the constants of quantised ones."""
    for parameter in model.parameters():
        yield parameter
        state = getattr(parameter, "quant_state", None)
        while state is not None:  # double quantisation: the constants have a state of their own
            yield from (value for value in vars(state).values() if isinstance(value, Tensor))
            state = state.state2
        constants = getattr(parameter, "SCB", None)
        if isinstance(constants, Tensor):
            yield constants


class _Convert:
    """A forward hook that gives the output in another precision."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, _: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
        return output.to(self.dtype)
