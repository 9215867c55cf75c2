"""Linear layers whose weights and inputs are FP8 (e4m3) numbers, each row with a scale of its own.

A row of a weight is s times e4m3 numbers, with s so that the largest is 448, the largest of e4m3; a row of the input
(a token) likewise, anew in each pass. Both have 3 bits after the leading one. Only the frozen product is in FP8: its
gradient is one in the precision that computes, with the weight dequantised, and an adapter's products stay there, too.
Where a device multiplies no FP8 numbers the product is emulated: the same numbers, multiplied in the precision that
computes.

Legend: N tokens, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
WORD = 16
"""Inputs and outputs of a product of a device are a multiple of these."""


class Fp8Linear(nn.Linear):
    """A frozen linear layer in FP8.

    Its weight is stored as bytes, which nothing takes for numbers of a precision that it may convert.
    """

    weight_scale: Tensor

    def __init__(self, inputs: int, outputs: int, *, bias: nn.Parameter | None, device: torch.device | None) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = inputs, outputs, bias  # type: ignore[assignment]
        stored = torch.zeros(outputs, inputs, dtype=torch.uint8, device=device)
        self.weight = nn.Parameter(stored, requires_grad=False)
        self.register_buffer("weight_scale", torch.ones(outputs, dtype=torch.float32, device=device))

    def _apply(self, *given: Any, **named: Any) -> Any:
        """Moves its tensors; the scales stay in float32 where a whole model is converted."""
        scale_O = self.weight_scale
        super()._apply(*given, **named)  # type: ignore[no-untyped-call]
        if self.weight_scale.dtype != scale_O.dtype:
            self.weight_scale = scale_O.to(self.weight_scale.device)
        return self

    def forward(self, input: Tensor) -> Tensor:
        product: Tensor = _RoundedProduct.apply(input.flatten(0, -2), self)  # type: ignore[no-untyped-call]
        # No view, which nobody could change in place.
        output: Tensor = torch.ops.aten._unsafe_view(product, [*input.shape[:-1], self.out_features])
        return output if self.bias is None else output.add_(self.bias.to(output.dtype))

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight (O, I) as numbers, in a new tensor."""
        rows = self.weight.view(E4M3).to(dtype if dtype != torch.float16 else torch.float32)
        return rows.mul_(self.weight_scale.to(rows.dtype)[:, None]).to(dtype)


def rounded(rows_NF: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in e4m3, and their scales (N, 1) in float32: a row is nearly scale times these.

    A number of at least 2^-15 of its row's largest is off by at most 1/16 of itself.

    Examples:
        >>> import torch
        >>> rows, scale = rounded(torch.tensor([[1.0, -448.0, 0.3]]))
        >>> rows.float() * scale
        tensor([[   1.0000, -448.0000,    0.3125]])
    """
    scale_N1 = (rows_NF.abs().amax(-1, keepdim=True).float() / LARGEST).clamp_min_(torch.finfo(torch.float32).tiny)
    return (rows_NF.float() / scale_N1).clamp_(-LARGEST, LARGEST).to(E4M3), scale_N1


def multiplies(device: torch.device) -> bool:
    """Whether a device multiplies FP8 numbers with a scale for each row: NVIDIA's from compute capability 8.9 on."""
    if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def product(x_NI: Tensor, layer: Fp8Linear) -> Tensor:
    """The product (N, O) of rounded inputs with the weight of a layer."""
    rows_NI, scale_N1 = rounded(x_NI)
    weight_OI, scale_1O = layer.weight.view(E4M3), layer.weight_scale[None]
    whole = layer.in_features % WORD == layer.out_features % WORD == 0 and x_NI.dtype == torch.bfloat16
    if whole and multiplies(x_NI.device):
        by_row: Any = F.ScalingType.RowWise
        return F.scaled_mm(rows_NI, weight_OI.T, scale_N1, by_row, scale_1O, by_row, output_dtype=x_NI.dtype)
    compute = torch.float32 if x_NI.dtype == torch.float16 else x_NI.dtype  # sums may exceed what float16 holds
    return (F.linear(rows_NI.to(compute), weight_OI.to(compute)) * scale_N1).mul_(scale_1O).to(x_NI.dtype)


class _RoundedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, layer: Fp8Linear) -> Tensor:
        ctx.layer = layer
        return product(x_NI, layer)

    @staticmethod
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor, None]:
        return grad_NO @ ctx.layer.dense(grad_NO.dtype), None


def takes(layer: nn.Module) -> bool:
    """Whether a layer can be one in FP8: exactly linear, as subclasses may compute something else."""
    return type(layer) in (nn.Linear, Conv1D)


def pack(layer: Any) -> Fp8Linear:
    """A layer in FP8 in place of a plain one; without values."""
    outputs, inputs = layer.weight.shape if isinstance(layer, nn.Linear) else layer.weight.T.shape
    packed = Fp8Linear(inputs, outputs, bias=layer.bias, device=layer.weight.device)
    packed.transposed = isinstance(layer, Conv1D)  # type: ignore[assignment]
    return packed.train(layer.training)


def unpack(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace layers in FP8 by plain ones that multiply with the same weight."""
    for path, layer in [pair for pair in model.named_modules() if isinstance(pair[1], Fp8Linear)]:
        outputs, inputs = layer.weight.shape
        plain = nn.Linear(inputs, outputs, bias=False, device="meta")
        plain.weight, plain.bias = nn.Parameter(layer.dense(dtype), requires_grad=False), layer.bias
        model.set_submodule(path, plain)
