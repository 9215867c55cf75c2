"""Layers of bitsandbytes whose weights are imagined, packed as they are after loading."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workbench.planning.imagined import unimagined


def pack(model: nn.Module, compute: torch.dtype) -> None:
    """Give the quantised layers of an imagined model packed weights; those of any other model stay as they are.

    Where 8-bit layers treat outliers apart, how many there are is not known: they are imagined without.
    """
    from bitsandbytes.functional import quantize_4bit  # a second to import, and most plans need none of it
    from bitsandbytes.nn.modules import Linear4bit, Linear8bitLt

    with unimagined():
        quantize_4bit(torch.zeros(64, 64), compress_statistics=True)  # makes tables that later runs use too
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.weight = _four_bits(module, compute)
            module.support_avx512bf16_for_cpu = False
        elif isinstance(module, Linear8bitLt):
            module.weight = _eight_bits(module)
            module.state.threshold = 0.0


def _four_bits(module: nn.Linear, compute: torch.dtype) -> nn.Parameter:
    from bitsandbytes.functional import quantize_4bit

    kind = module.weight.quant_type
    whole = torch.empty(module.out_features, module.in_features, dtype=compute, device=module.weight.device)
    packed, state = quantize_4bit(whole, compress_statistics=True, quant_type=kind)
    weight = nn.Parameter(packed, requires_grad=False)
    weight.quant_state = state  # type: ignore[attr-defined]
    return weight


def _eight_bits(module: nn.Linear) -> nn.Parameter:
    device = module.weight.device
    whole = torch.empty(module.out_features, module.in_features, dtype=torch.int8, device=device)
    weight = nn.Parameter(whole, requires_grad=False)
    scales: Tensor = torch.empty(module.out_features, dtype=torch.float32, device=device)
    weight.CB, weight.SCB = weight, scales  # type: ignore[attr-defined]
    return weight
