"""LoRA over a frozen linear layer as one operation: no output-sized temporaries, one scale on the small side.

Legend: N tokens, I inputs, O outputs, R rank.
"""

from __future__ import annotations

from types import NoneType
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.adapters.shifted_lora import Shift, shifted_factors
from workbench.models.weight_storage import StoredLinear


class FusedLoraLinear(LoraLinear):
    """PEFT's LoRA layer with a faster forward pass for the plain case; everything else is PEFT's own.

    PEFT scales and adds the update at the size of the output, in both passes. Here the scale meets the
    (N, R) product and the update is accumulated into the layer's output, and its gradient into the input's.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        name = self.active_adapters[0] if self.active_adapters else ""
        if not self._is_plain(name) or args or kwargs:
            output: Tensor = super().forward(x, *args, **kwargs)
            return output
        base, (down, up) = self.get_base_layer(), self._factors(name)
        weights = (base.weight, base.bias, down.to(x.dtype), up.to(x.dtype))
        fused: Tensor = _LoraLinear.apply(x, *weights, self.scaling[name])  # type: ignore[no-untyped-call]
        return fused

    def _factors(self, name: str) -> tuple[Tensor, Tensor]:
        if name in self.lora_variant:
            return shifted_factors(self, name)
        down: Tensor = self.lora_A[name].weight  # type: ignore[assignment]
        up: Tensor = self.lora_B[name].weight  # type: ignore[assignment]
        return down, up

    def _is_plain(self, name: str) -> bool:
        return (
            len(self.active_adapters) == 1
            and name in self.lora_A
            and not self.disable_adapters
            and not self.merged
            and not (self.training and isinstance(self.lora_dropout[name], nn.Dropout))
            and isinstance(self.lora_variant.get(name), (Shift, NoneType))
            and self.lora_B[name].bias is None
        )


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_OI: Tensor, bias: Tensor | None, down_RI: Tensor, up_OR: Tensor, scale: float
    ) -> Tensor:
        x_NI = x.reshape(-1, x.shape[-1])
        inner_NR = (x_NI @ down_RI.T).mul_(scale)
        output_NO = F.linear(x_NI, weight_OI.to(x.dtype), None if bias is None else bias.to(x.dtype))
        output_NO.addmm_(inner_NR, up_OR.T)
        # A frozen adapter's gradient needs neither the inputs nor the inner products: they are not kept.
        learns = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
        ctx.save_for_backward(x_NI if learns else None, inner_NR if learns else None, weight_OI, down_RI, up_OR)
        ctx.scale = scale
        return output_NO.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, inner_NR, weight_OI, down_RI, up_OR = ctx.saved_tensors
        grad_NO = grad.reshape(-1, grad.shape[-1])
        inner_grad_NR = (grad_NO @ up_OR).mul_(ctx.scale)
        x_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = (grad_NO @ weight_OI.to(grad.dtype)).addmm_(inner_grad_NR, down_RI)
            x_grad = x_grad.view(*grad.shape[:-1], -1)
        down_grad = inner_grad_NR.T @ x_NI if ctx.needs_input_grad[3] else None
        up_grad = grad_NO.T @ inner_NR if ctx.needs_input_grad[4] else None
        return x_grad, None, None, down_grad, up_grad, None


def fuse(model: nn.Module) -> None:
    """Give every plain LoRA layer over a frozen, unquantised linear layer the fused forward pass."""
    for module in model.modules():
        if type(module) is LoraLinear and type(module.get_base_layer()) in (nn.Linear, StoredLinear):
            module.__class__ = FusedLoraLinear
