"""Layers of bitsandbytes with fake weights, or those of a small model that is timed, packed as they are after loading.

8-bit layers keep the columns of their inputs that hold outliers in half precision. Which these are depends on weights
and rows, so that every column is taken for one: what is counted is the most that may be.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from workbench.planning.fake_tensors import INSTEAD, real_tensors

BYTES = {"int8": 1.0, "nf4": 0.5, "fp4": 0.5}
"""Bytes of a packed weight's element."""


def pack(model: nn.Module, weights: str, compute: torch.dtype) -> None:
    """Give the quantised layers of a model packed weights."""
    from bitsandbytes.functional import quantize_4bit  # a second to import, and most plans need none of it
    from bitsandbytes.nn.modules import Linear4bit, Linear8bitLt

    with real_tensors():
        quantize_4bit(torch.zeros(64, 64), compress_statistics=True)  # makes tables that later runs use too
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.weight = _four_bits(module, weights, compute)
            module.support_avx512bf16_for_cpu = False
        elif isinstance(module, Linear8bitLt):
            module.weight = _eight_bits(module)


def packed_bytes(model: nn.Module, weights: str) -> int:
    """Bytes of a blueprint's weights once its quantised layers are packed, their scales left out."""
    whole = sum(each.nbytes for each in model.parameters())
    if weights not in BYTES:
        return whole
    from bitsandbytes.nn.modules import Linear4bit, Linear8bitLt

    layers = [each.weight for each in model.modules() if isinstance(each, (Linear4bit, Linear8bitLt))]
    return whole - sum(each.nbytes - round(each.numel() * BYTES[weights]) for each in layers)


def _with_outliers(rows: Tensor, threshold: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Rows (N, I) in 8 bits, their scales, and the columns that hold outliers: all."""
    packed, scales, _ = torch.ops.bitsandbytes.int8_vectorwise_quant.default(rows)
    return packed, scales, torch.empty(rows.shape[-1], dtype=torch.int64, device=rows.device)


def _mixed_product(rows: Tensor, packed: Tensor, weight_OI: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    """The product (N, O) of rows with a packed weight, and a copy of the columns that hold outliers."""
    return rows.new_empty(*packed.shape[:-1], len(weight_OI)), torch.empty_like(rows)


INSTEAD["bitsandbytes.int8_vectorwise_quant.default"] = _with_outliers
INSTEAD["bitsandbytes.int8_mixed_scaled_mm.default"] = _mixed_product


def _four_bits(module: nn.Linear, weights: str, compute: torch.dtype) -> nn.Parameter:
    from bitsandbytes.functional import quantize_4bit
    from bitsandbytes.nn import modules

    whole = torch.zeros(module.out_features, module.in_features, dtype=compute, device=module.weight.device)
    packed, state = quantize_4bit(whole, compress_statistics=True, quant_type=weights)
    if isinstance(packed, FakeTensor):
        return Params4bit.of(packed, state)
    return modules.Params4bit(packed, quant_state=state, quant_type=weights, bnb_quantized=True)


class Params4bit(FakeTensor):
    """A packed weight, of the name by which PEFT knows bitsandbytes' and unpacks them, as for the norms of DoRA."""

    quant_state: Any

    @classmethod
    def of(cls, packed: Tensor, state: Any) -> nn.Parameter:
        """The fake values with how they are packed."""
        weight = nn.Parameter(packed, requires_grad=False)
        weight.__class__ = cls  # type: ignore[assignment]
        weight.quant_state = state  # type: ignore[attr-defined]
        return weight

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return self.of(self.detach().clone(), self.quant_state)


def _eight_bits(module: nn.Linear) -> nn.Parameter:
    from bitsandbytes.nn import modules

    device = module.weight.device
    whole = torch.zeros(module.out_features, module.in_features, dtype=torch.int8, device=device)
    scales = torch.ones(module.out_features, dtype=torch.float32, device=device)
    if isinstance(whole, FakeTensor):
        return Int8Params.of(whole, scales)
    return modules.Int8Params(whole, requires_grad=False, has_fp16_weights=False, CB=whole, SCB=scales)


class Int8Params(FakeTensor):
    """A packed weight that stays one where a module moves or copies its parameters, as PEFT does for some methods."""

    CB: Tensor | None
    SCB: Tensor | None

    @classmethod
    def of(cls, packed: Tensor, scales: Tensor | None) -> nn.Parameter:
        """The fake values with the scales of their outputs; None: the layer holds both already."""
        weight = nn.Parameter(packed, requires_grad=False)
        weight.__class__ = cls  # type: ignore[assignment]
        weight.CB, weight.SCB = (None if scales is None else weight), scales  # type: ignore[attr-defined]
        return weight

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """Elsewhere, or in another precision, in which it is no packed weight."""
        moved: Tensor = super().to(*args, **kwargs)
        return moved if moved is self or moved.dtype != self.dtype else self.of(moved, self.SCB)

    def detach(self) -> Tensor:
        """The same values."""
        return self.of(super().detach(), self.SCB)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return self.of(super().detach().clone(), self.SCB)
