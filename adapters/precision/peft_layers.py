"""PEFT's layers in any precision: over quantised and half-precision weights, and with dropout and noise by row.

Legend: B rows, T tokens of a row, N blocks, I inputs, O outputs, R ranks, K singular vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft.tuners import adalora, c3a, gralora, ia3, loha, lokr, osf, road, shira, supertuning, tinylora, unilora, vera
from peft.tuners.c3a.utils import BlockCircularConvolution
from peft.tuners.delora.layer import DeloraLinear
from peft.tuners.hra.layer import HRAConv2d
from peft.tuners.lora import dora
from peft.tuners.lora.layer import Conv2d as LoraConv2d
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.lora.variants import ALoraLinearVariant
from peft.tuners.osf.layer import Linear
from peft.tuners.pvera.layer import PveraLayer
from peft.tuners.randlora.layer import RandLoraLayer
from peft.tuners.road.layer import RoadLayer
from peft.tuners.tuners_utils import BaseTuner
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.adapters.anatomy import dense_weight
from workbench.adapters.precision.quantised_weights import SharingLayer


class OsfLinear(Linear):
    """W x + (U S V - U0 S0 V0) x, with small singular parts U (O, R), S (R,) and V (R, I) that began as U0, S0, V0.

    The gradients leave the large singular parts alone (Nayak et al. 2025, arXiv:2504.07097). PEFT projects them by
    hooks of the parameters. Such hooks are lost where a parameter is converted or sharded, as over half-precision
    weights and by FSDP2, and they ask for gradients in the precision of the stored parts. Here the projection is a part
    of the computation.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = self.base_layer(x, *args, **kwargs)
        name = self.active_adapters[0] if self.active_adapters else ""
        if self.disable_adapters or self.merged or name not in self.osf_svd_params:
            return result
        parts: Any = self.osf_svd_params[name]
        U_OR, V_IR = self._osf_U_low_init[name], self._osf_V_low_init[name].T
        # Of a square matrix both parts are a basis, and the large one is not stored.
        stored: tuple[Any, ...] = (self._osf_U_high, self._osf_V_high)
        large_U_OK, large_V_KI = (dict(each.items()).get(name) for each in stored)
        large_V_IK = None if large_V_KI is None else large_V_KI.T
        orthogonal: Any = _OrthogonalGradient.apply
        trained_U_OR: Tensor = orthogonal(parts["U_low"], U_OR, large_U_OK)
        trained_V_IR: Tensor = orthogonal(parts["V_low"].T, V_IR, large_V_IK)
        outputs = torch.cat([trained_U_OR * parts["S_low"], -U_OR * self._osf_S_low_init[name]], dim=1)
        inputs = torch.cat([trained_V_IR, V_IR], dim=1)
        update = F.linear(F.linear(x.to(inputs.dtype), inputs.T), outputs)
        return result + update.to(result.dtype)


class _OrthogonalGradient(torch.autograd.Function):
    """The small singular vectors as they are (N, R), with a gradient that is orthogonal to the large ones.

    Inputs: those that train, their values at the start, and the large ones (N, K); None where small and large ones are
    a basis, so that the gradient stays within the small ones.
    """

    @staticmethod
    def forward(ctx: Any, trained_NR: Tensor, start_NR: Tensor, large_NK: Tensor | None) -> Tensor:
        ctx.save_for_backward(start_NR, large_NK)
        return trained_NR.view_as(trained_NR)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        start_NR, large_NK = ctx.saved_tensors
        grad_NR = grad.to(start_NR.dtype)
        basis = start_NR if large_NK is None else large_NK
        within_NR = basis @ (basis.T @ grad_NR)
        return (within_NR if large_NK is None else grad_NR - within_NR).to(grad.dtype), None, None


class ActivatedUpdate(ALoraLinearVariant):
    """Activated LoRA's update, with dropout by row; PEFT's own adds to the layer's outputs in place."""

    @staticmethod
    def forward(
        module: Any,
        active_adapter: str,
        x: Tensor,
        result: Tensor,
        *,
        alora_offsets: list[int | None] | None = None,
        **_: Any,
    ) -> Tensor:
        """The outputs `result` (B, T, O) and the update of the last `alora_offsets` tokens of each row.

        Args:
            x: Inputs (B, T, I) of the layer; or (B * T, I), as OPT's are, with such a result.
            alora_offsets: From the first token of the invocation to the end of the row, padding included; None where
                there is no invocation. In a pass that goes on from a cache it may be more than the tokens.
        """
        down, up = module.lora_A[active_adapter], module.lora_B[active_adapter]
        x = module.lora_dropout[active_adapter](x.to(down.weight.dtype))
        update_BTO = up(down(x)) * module.scaling[active_adapter]
        offsets = [0] * len(result) if alora_offsets is None else [each or 0 for each in alora_offsets]
        tokens = result[..., 0].numel() // len(offsets)
        before_B = tokens - torch.tensor(offsets, device=result.device)
        acts_BT = torch.arange(tokens, device=result.device) >= before_B[:, None]
        acts = acts_BT.view(*result.shape[:-1], 1)
        return torch.where(acts, result + update_BTO.to(result.dtype), result)


class InInputPrecision:
    """Mixed into a layer of PEFT, which then computes in the half precision of its inputs, where they are in one."""

    def forward(self, x: Tensor) -> Tensor:
        inner: Any = super()
        if x.dtype not in (torch.bfloat16, torch.float16):
            whole: Tensor = inner.forward(x)
            return whole
        with torch.autocast(x.device.type, x.dtype):
            half: Tensor = inner.forward(x)
        return half.to(x.dtype)


class RoadLinear(InInputPrecision, road.layer.Linear):
    """RoAd that merges into a bias in the precision of the weight beside it."""

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        base: Any = self.get_base_layer()
        stored = None if base.bias is None else base.bias.dtype
        if stored is not None:
            base.bias.data = base.bias.data.to(base.weight.dtype)
        super().merge(safe_merge, adapter_names)
        if stored is not None:
            base.bias.data = base.bias.data.to(stored)


class C3aLinear(c3a.layer.C3ALinear):
    """C3A that adds to the outputs of the layer out of place."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base_layer(x)
        for name in computing(self):
            kernel_OIN = self.c3a_kernel[name].float()
            update = BlockCircularConvolution.apply(x.float(), kernel_OIN) / x.shape[-1]  # type: ignore[no-untyped-call]
            result = result + update.to(result.dtype)
        return result


class GraloraLinear(gralora.layer.Linear):
    """GraLoRA that adds to the outputs of the layer out of place."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base_layer(x)
        for name in computing(self):
            A_NIR, B_NRO = self.gralora_A[name], self.gralora_B[name]
            count = self.gralora_k[name]
            x_BNI = self.gralora_dropout[name](x.to(A_NIR.dtype)).reshape(-1, count, A_NIR.shape[1])
            inner_BNR = torch.einsum("bni,nir->bnr", x_BNI, A_NIR)
            # The ranks of each block of inputs are divided among all blocks of outputs.
            turned_BNR = inner_BNR.unflatten(2, (count, -1)).transpose(1, 2).flatten(2)
            update = torch.einsum("bnr,nro->bno", turned_BNR, B_NRO).reshape(result.shape)
            result = result + (self.scaling[name] * update).to(result.dtype)
        return result


class SparseUpdate:
    """Mixed into a layer of PEFT whose update is a sparse matrix: it is added to the outputs of the layer."""

    def forward(self, x: Tensor) -> Tensor:
        layer: Any = self
        result: Tensor = layer.base_layer(x)
        for name in computing(layer):
            update = self.update(name)
            result = result + F.linear(x.to(update.dtype), update).to(result.dtype)
        return result

    def update(self, name: str) -> Tensor:
        """The whole update, outputs first."""
        layer: Any = self
        flat, values = self.places(name)
        whole = values.new_zeros(layer.out_features * layer.in_features).index_put((flat,), values)
        return whole.view(layer.out_features, -1)

    def places(self, name: str) -> tuple[Tensor, Tensor]:
        """Indices into the flat weight (outputs first), and what is added there."""
        raise NotImplementedError


class ShiraLinear(SparseUpdate, shira.layer.Linear):
    """SHiRA, whose update is added to the weights as a dense matrix when it is merged, too."""

    def get_delta_weight(self, adapter: str) -> Tensor:
        return self.update(adapter)

    def places(self, name: str) -> tuple[Tensor, Tensor]:
        rows, columns = self.shira_indices[name].to(self.shira_weight[name].device).long()
        return rows * self.in_features + columns, self.shira_weight[name] * self.scaling[name]


class SuperLinear(SparseUpdate, supertuning.layer.Linear):
    """Super-Tuning, with its low-rank update where there is one."""

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        for name in (each for each in computing(self) if self.supertuning_rank[each]):
            A, B = self.supertuning_lora_A[name], self.supertuning_lora_B[name]
            weight: Any = A.weight
            inner = A(self.supertuning_lora_dropout[name](x.to(weight.dtype)))
            scale = self.supertuning_lora_alpha[name] / self.supertuning_rank[name]
            result = result + (B(inner) * scale).to(result.dtype)
        return result

    def places(self, name: str) -> tuple[Tensor, Tensor]:
        return self.supertuning_indices[name].long(), self.supertuning_values[name]


def computing(layer: Any) -> list[str]:
    """Names of the adapters whose updates a layer adds now."""
    if layer.disable_adapters or layer.merged:
        return []
    held = {name for part in layer.adapter_layer_names for name in getattr(layer, part)}
    return [name for name in layer.active_adapters if name in held]


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


_REPLACED: dict[type, type] = {
    vera.Linear: VeraLinear,
    c3a.layer.C3ALinear: C3aLinear,
    gralora.layer.Linear: GraloraLinear,
    road.layer.Linear: RoadLinear,
    shira.layer.Linear: ShiraLinear,
    supertuning.layer.Linear: SuperLinear,
    ia3.IA3Model: DetachableIa3,
    LoraConv2d: ShapedLoraConv2d,
}
"""Classes that compute in any precision, by those of PEFT."""
for _kind in (HRAConv2d, loha.layer.Conv2d, lokr.layer.Conv2d):
    _REPLACED[_kind] = type(f"Shaped{_kind.__name__}", (ConvolutionShape, _kind), {})
_CONVERTED = (DeloraLinear, PveraLayer, RandLoraLayer, RoadLayer, tinylora.layer.Linear, unilora.layer.Linear)
"""Layers of PEFT that compute in any precision once their inputs are converted: `InInputPrecision` does that."""

_DORA: Any = dora
_DEQUANTISE = _DORA.dequantize_module_weight


def _dequantise(layer: Any) -> Tensor:
    """The dense weight whose norms DoRA takes.

    PEFT's own, on a CPU, loses the scales of an int8 layer once it ran; and it knows no layer that waits for its
    device.
    """
    if layer.weight.dtype == torch.int8 or "unpacked" in vars(layer):
        return dense_weight(layer)
    if isinstance(layer, SharingLayer):
        return layer.latest.of(layer, layer.weight.quant_state.dtype)
    weight: Tensor = _DEQUANTISE(layer)
    return weight


_DORA.dequantize_module_weight = _dequantise


def compute_in_any_precision(model: nn.Module) -> None:
    """Replace the classes of PEFT's layers in `model` by those that compute in any precision, where they would fail."""
    for module in model.modules():
        kind = type(module)
        if isinstance(module, LoraLayer):
            for name, variant in module.lora_variant.items():
                if type(variant) is ALoraLinearVariant:
                    module.lora_variant[name] = ActivatedUpdate()
        if kind not in _REPLACED and isinstance(module, _CONVERTED) and not isinstance(module, InInputPrecision):
            _REPLACED[kind] = type(f"Converted{kind.__name__}", (InInputPrecision, kind), {})
        if kind in _REPLACED:
            module.__class__ = _REPLACED[kind]
        elif isinstance(module, ia3.IA3Layer) and not isinstance(module, ia3.Linear):
            module.__class__ = QuantisedIa3  # type: ignore[assignment]
        elif type(module) is osf.layer.Linear:
            module._detach_hooks()  # type: ignore[no-untyped-call]
            module.__class__ = OsfLinear
        elif isinstance(module, adalora.AdaLoraLayer):
            module.ranknum.requires_grad_(False)  # PEFT moves it to the device of 4-bit weights as a trainable one
            if not isinstance(module, adalora.SVDLinear):
                module.__class__ = QuantisedAdaLora  # type: ignore[assignment]
