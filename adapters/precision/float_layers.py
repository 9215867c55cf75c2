"""PEFT's layers whose frozen parts are float32, or which change what a quantised layer gives, in any precision.

Legend: B rows, T tokens, N blocks, I inputs of a block, R ranks of a block, O outputs of a block.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners import c3a, gralora, road, shira, supertuning, tinylora, unilora
from peft.tuners.c3a.utils import BlockCircularConvolution
from peft.tuners.delora.layer import DeloraLinear
from peft.tuners.pvera.layer import PveraLayer
from peft.tuners.randlora.layer import RandLoraLayer
from peft.tuners.road.layer import RoadLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.nn import functional as F


class InInputPrecision:
    """Mixed into a layer of PEFT, which then multiplies in the precision of its inputs, and gives outputs in it."""

    def forward(self, x: Tensor) -> Tensor:
        inner: Any = super()
        if x.dtype == torch.float32:
            whole: Tensor = inner.forward(x)
            return whole
        with torch.autocast(x.device.type, x.dtype):
            half: Tensor = inner.forward(x)
        return half.to(x.dtype)


class RoadLinear(InInputPrecision, road.layer.Linear):
    """RoAd that merges into a bias in the precision of the weight beside it."""

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        base: Any = self.get_base_layer()
        weight, bias = base.weight, base.bias
        if bias is None:
            super().merge(safe_merge, adapter_names)
            return
        stored = bias.dtype
        bias.data = bias.data.to(weight.dtype)
        super().merge(safe_merge, adapter_names)
        bias.data = bias.data.to(stored)


class C3aLinear(c3a.layer.C3ALinear):
    """C3A that adds to the outputs of the layer, rather than into them."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base_layer(x)
        for name in computing(self):
            kernel_OIN = self.c3a_kernel[name].float()
            update = BlockCircularConvolution.apply(x.float(), kernel_OIN) / x.shape[-1]  # type: ignore[no-untyped-call]
            result = result + update.to(result.dtype)
        return result


class GraloraLinear(gralora.layer.Linear):
    """GraLoRA that adds to the outputs of the layer, rather than into them."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base_layer(x)
        for name in computing(self):
            A_NIR, B_NRO = self.gralora_A[name], self.gralora_B[name]
            count = self.gralora_k[name]
            x_BNI = self.gralora_dropout[name](x.to(A_NIR.dtype)).reshape(-1, count, A_NIR.shape[1])
            inner_BNR = torch.einsum("bni,nir->bnr", x_BNI, A_NIR)
            # The ranks of each block of inputs are shared out among all blocks of outputs.
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
    off = layer.disable_adapters or layer.merged
    return [] if off else [name for name in layer.active_adapters if name in _held(layer)]


def _held(layer: BaseTunerLayer) -> set[str]:
    parts = (getattr(layer, name) for name in layer.adapter_layer_names)
    return {name for part in parts for name in part}


_REPLACED: dict[type[nn.Module], type[nn.Module]] = {
    c3a.layer.C3ALinear: C3aLinear,
    gralora.layer.Linear: GraloraLinear,
    road.layer.Linear: RoadLinear,
    shira.layer.Linear: ShiraLinear,
    supertuning.layer.Linear: SuperLinear,
}
_CONVERTED = (DeloraLinear, PveraLayer, RandLoraLayer, RoadLayer, tinylora.layer.Linear, unilora.layer.Linear)
_MADE: dict[type[nn.Module], type[nn.Module]] = {}
"""Classes with `InInputPrecision` in front, by those of PEFT."""


def replacement(module: nn.Module) -> type[nn.Module] | None:
    """The class that computes as a layer of PEFT does, in any precision; None where PEFT's own does."""
    kind = type(module)
    if kind in _REPLACED:
        return _REPLACED[kind]
    if isinstance(module, _CONVERTED) and not isinstance(module, InInputPrecision):
        if kind not in _MADE:
            _MADE[kind] = type(f"Converted{kind.__name__}", (InInputPrecision, kind), {})
        return _MADE[kind]
    return None
