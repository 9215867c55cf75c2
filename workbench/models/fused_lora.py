"""LoRA over a frozen linear layer as one operation: no output-sized temporaries, one scale on the small side.

Legend: N tokens, I inputs, O outputs, R rank.
"""

from __future__ import annotations

from functools import cache
from types import NoneType
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.adapters.precision.quantised_weights import dequantised, is_quantised
from workbench.adapters.updates.lora_start_values import Shift, shifted_factors
from workbench.models.weight_formats import StoredLinear


class FusedLora:
    """Mixed into a LoRA layer of PEFT: a faster forward pass for the plain case; everything else is PEFT's own.

    PEFT scales and adds the update at the size of the output, in both passes. Here the scale meets the
    (N, R) product and the update is accumulated into the layer's output, and its gradient into the input's.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layer: Any = self
        name = layer.active_adapters[0] if layer.active_adapters else ""
        if not self._is_plain(name, x) or args or kwargs:
            inner: Any = super()
            output: Tensor = inner.forward(x, *args, **kwargs)
            return output
        base, (down, up) = layer.get_base_layer(), self._factors(name)
        weights = (base.weight, base.bias, down.to(x.dtype), up.to(x.dtype))
        packed = base if is_quantised(base) else None
        fused: Tensor = _LoraLinear.apply(x, *weights, layer.scaling[name], packed)  # type: ignore[no-untyped-call]
        return fused

    def _factors(self, name: str) -> tuple[Tensor, Tensor]:
        layer: Any = self
        if name in layer.lora_variant:
            return shifted_factors(self, name)
        down, up = layer.lora_A[name].weight, layer.lora_B[name].weight
        return down, up

    def _is_plain(self, name: str, x: Tensor) -> bool:
        layer: Any = self
        return (
            len(layer.active_adapters) == 1
            and name in layer.lora_A
            and not layer.disable_adapters
            and not layer.merged
            and not (layer.training and isinstance(layer.lora_dropout[name], nn.Dropout))
            and isinstance(layer.lora_variant.get(name), (Shift, NoneType))
            and layer.lora_B[name].bias is None
        )


class FusedLoraLinear(FusedLora, LoraLinear):
    """LoRA over weights that are not quantised."""


class FusedQuantisedLora(FusedLora):
    """LoRA over quantised weights, which are dequantised for the forward and again for the backward pass."""

    def _is_plain(self, name: str, x: Tensor) -> bool:
        layer: Any = self
        base = layer.get_base_layer()
        # 8-bit layers evaluate by a product of integers; 4-bit ones cast inputs to the precision that they compute in.
        same = layer.training if base.weight.dtype == torch.int8 else x.dtype == base.compute_dtype
        return bool(same) and super()._is_plain(name, x)


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_OI: Tensor,
        bias: Tensor | None,
        down_RI: Tensor,
        up_OR: Tensor,
        scale: float,
        packed: nn.Module | None,
    ) -> Tensor:
        x_NI = x.reshape(-1, x.shape[-1])
        inner_NR = (x_NI @ down_RI.T).mul_(scale)
        output_NO = F.linear(x_NI, _dense(weight_OI, packed, x.dtype), None if bias is None else bias.to(x.dtype))
        output_NO.addmm_(inner_NR, up_OR.T)
        # A frozen adapter's gradient needs neither the inputs nor the inner products: they are not kept.
        learns = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
        ctx.save_for_backward(x_NI if learns else None, inner_NR if learns else None, weight_OI, down_RI, up_OR)
        ctx.scale, ctx.packed = scale, packed
        # No view, which nobody could change in place: Llama 4's experts add to what their dense layer returned.
        output: Tensor = torch.ops.aten._unsafe_view(output_NO, [*x.shape[:-1], output_NO.shape[-1]])
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, inner_NR, weight_OI, down_RI, up_OR = ctx.saved_tensors
        grad_NO = grad.reshape(-1, grad.shape[-1])
        inner_grad_NR = (grad_NO @ up_OR).mul_(ctx.scale)
        x_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = (grad_NO @ _dense(weight_OI, ctx.packed, grad.dtype)).addmm_(inner_grad_NR, down_RI)
            x_grad = x_grad.view(*grad.shape[:-1], -1)
        down_grad = inner_grad_NR.T @ x_NI if ctx.needs_input_grad[3] else None
        up_grad = grad_NO.T @ inner_NR if ctx.needs_input_grad[4] else None
        return x_grad, None, None, down_grad, up_grad, None, None


def _dense(weight_OI: Tensor, packed: nn.Module | None, dtype: torch.dtype) -> Tensor:
    """The weight as numbers: itself, or, where bitsandbytes has packed it, that of its layer."""
    return weight_OI.to(dtype) if packed is None else dequantised(packed, dtype)


def fuse(model: nn.Module) -> None:
    """Give every plain LoRA layer over a frozen linear layer the fused forward pass.

    On an accelerator, too, a quantised weight is dequantised for each product: bitsandbytes does the same where it
    trains 4-bit weights, and its product of 8-bit integers, which rounds the inputs, is left to evaluations.
    """
    for module in model.modules():
        if not isinstance(module, LoraLayer):
            continue
        layer: Any = module
        base, kind = layer.get_base_layer(), type(layer)
        if kind is LoraLinear and type(base) in (nn.Linear, StoredLinear):
            layer.__class__ = FusedLoraLinear
        elif is_quantised(base) and kind in _quantised():
            layer.__class__ = _quantised()[kind]


@cache
def _quantised() -> dict[type[nn.Module], type[nn.Module]]:
    """Fused layers by those of PEFT, which it has where bitsandbytes can be imported."""
    from peft.tuners.lora.bnb import Linear4bit, Linear8bitLt  # a second to import, and most runs need none of it

    return {kind: type(f"Fused{kind.__name__}", (FusedQuantisedLora, kind), {}) for kind in (Linear4bit, Linear8bitLt)}
