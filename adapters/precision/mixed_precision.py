"""Replacements of PEFT's layers that need unquantised weights or float32: these take any precision.

Legend: R ranks, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft.tuners import adalora, ia3, loha, lokr, osf, vera
from peft.tuners.hra.layer import HRAConv2d
from peft.tuners.lora import dora
from peft.tuners.lora.layer import Conv2d as LoraConv2d
from peft.tuners.tuners_utils import BaseTuner
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.adapters.anatomy import dense_weight
from workbench.adapters.precision.float_layers import replacement
from workbench.adapters.precision.latest_weight import SharingLayer
from workbench.adapters.updates.alora_layers import activate
from workbench.adapters.updates.osf_layers import OsfLinear


class VeraLinear(vera.Linear):
    """VeRA whose random matrices stay in float32 and are converted for each product."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base_layer(x)
        matrices: Any = self.vera_A, self.vera_B
        for name in () if self.disable_adapters or self.merged else self.active_adapters:
            d_R, b_O = self.vera_lambda_d[name], self.vera_lambda_b[name]
            down_RI = matrices[0][name][:, : self.in_features].to(x.device, d_R.dtype)
            up_OR = matrices[1][name][: self.out_features].to(x.device, d_R.dtype)
            inner = d_R * F.linear(self.vera_dropout[name](x.to(d_R.dtype)), down_RI)
            result = result + (b_O * F.linear(inner, up_OR)).to(result.dtype)
        return result


class QuantisedIa3(nn.Module, ia3.IA3Layer):
    """(IA)^3 over a quantised layer: scales the inputs of an MLP's last layer, and the outputs of all others."""

    def forward(self, x: Tensor) -> Tensor:
        names = () if self.disable_adapters else self.active_adapters
        factors = [self.ia3_l[name].flatten().to(x.dtype) for name in names]
        for factor in factors if self.is_feedforward else ():
            x = x * factor
        result: Tensor = self.base_layer(x)
        for factor in () if self.is_feedforward else factors:
            result = result * factor
        return result


class DetachableIa3(ia3.IA3Model):
    """(IA)^3 that can be removed from a quantised backbone; PEFT refuses that as if it were to be merged."""

    def unload(self) -> nn.Module:
        plain: Any = BaseTuner  # PEFT returns the model, and says None
        bare: nn.Module = plain._unload_and_optionally_merge(self, merge=False)
        return bare


class QuantisedAdaLora(nn.Module, adalora.AdaLoraLayer):
    """AdaLoRA over a quantised layer: adds scale * B diag(E) A x."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base_layer(x)
        for name in () if self.disable_adapters else self.active_adapters:
            A_RI = self.lora_A[name] * self.lora_E[name]
            inner = self.lora_dropout[name](x.to(A_RI.dtype)) @ A_RI.T * (self.scaling[name] / (self.r[name] + 1e-5))
            result = result + (inner @ self.lora_B[name].T).to(result.dtype)
        return result


class ConvolutionShape:
    """The shape of the convolution under a layer of PEFT's, which a backbone reads to pad by (MobileNetV2)."""

    get_base_layer: Callable[[], nn.Conv2d]

    @property
    def stride(self) -> Any:
        return self.get_base_layer().stride

    @property
    def dilation(self) -> Any:
        return self.get_base_layer().dilation

    @property
    def kernel_size(self) -> Any:
        return self.get_base_layer().kernel_size


class ShapedLoraConv2d(ConvolutionShape, LoraConv2d):
    """LoRA over a convolution."""


class ShapedHraConv2d(ConvolutionShape, HRAConv2d):
    """HRA over a convolution."""


class ShapedLohaConv2d(ConvolutionShape, loha.layer.Conv2d):
    """LoHa over a convolution."""


class ShapedLokrConv2d(ConvolutionShape, lokr.layer.Conv2d):
    """LoKr over a convolution."""


_SHAPED: dict[type, type] = {
    LoraConv2d: ShapedLoraConv2d,
    HRAConv2d: ShapedHraConv2d,
    loha.layer.Conv2d: ShapedLohaConv2d,
    lokr.layer.Conv2d: ShapedLokrConv2d,
}

_DORA: Any = dora
_DEQUANTISE = _DORA.dequantize_module_weight


def _dequantise(layer: Any) -> Tensor:
    """The dense weight whose norms DoRA takes; PEFT's own, on a CPU, loses the scales of an int8 layer once it ran."""
    if layer.weight.dtype == torch.int8:
        return dense_weight(layer)
    if isinstance(layer, SharingLayer):
        return layer.latest.of(layer, layer.weight.quant_state.dtype)
    weight: Tensor = _DEQUANTISE(layer)
    return weight


_DORA.dequantize_module_weight = _dequantise


def compute_in_any_precision(model: nn.Module) -> None:
    """Replace the classes of PEFT's layers in `model` by those that compute in any precision, where they would fail."""
    for module in model.modules():
        activate(module)
        if other := replacement(module):
            module.__class__ = other
        elif type(module) is vera.Linear:
            module.__class__ = VeraLinear
        elif type(module) in _SHAPED:
            module.__class__ = _SHAPED[type(module)]
        elif isinstance(module, ia3.IA3Layer) and not isinstance(module, ia3.Linear):
            module.__class__ = QuantisedIa3  # type: ignore[assignment]
        elif type(module) is ia3.IA3Model:
            module.__class__ = DetachableIa3
        elif type(module) is osf.layer.Linear:
            module._detach_hooks()  # type: ignore[no-untyped-call]
            module.__class__ = OsfLinear
        elif isinstance(module, adalora.AdaLoraLayer):
            module.ranknum.requires_grad_(False)  # PEFT moves it to the device of 4-bit weights as a trainable one
            if not isinstance(module, adalora.SVDLinear):
                module.__class__ = QuantisedAdaLora  # type: ignore[assignment]
