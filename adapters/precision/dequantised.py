"""Weights of bitsandbytes' layers as numbers, bit for bit those that it multiplies with when it trains on a CPU.

Legend: I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

CHUNK, LARGE_CHUNK = 2**18, 2**26
"""Elements of an 8-bit weight that are scaled in float32 at a time: 1 MB, which stays in a core's cache; and 256 MB."""


def is_quantised(layer: nn.Module) -> bool:
    """Whether bitsandbytes has packed the weight of a layer."""
    stored = getattr(layer, "weight", None)
    return isinstance(stored, Tensor) and (stored.dtype == torch.int8 or _state(layer) is not None)


def dequantised(layer: Any, dtype: torch.dtype) -> Tensor:
    """The weight (O, I) of a quantised layer, in a new tensor of `dtype`.

    4 bits are bitsandbytes' own kernel. 8 bits are v s / 127, computed in float32, with the largest value s of each
    output: bitsandbytes multiplies a half-precision matrix with a float32 column, an operation of mixed types that
    torch does not vectorise. On one core of an AMD EPYC, for 2,048 x 2,048 weights: 24.0 ms, and so 2.2.
    """
    stored = layer.weight
    if stored.dtype != torch.int8:
        from bitsandbytes.functional import dequantize_4bit  # a second to import, and most runs need none of it

        four: Tensor = dequantize_4bit(stored.data, _state(layer))
        return four.to(dtype)
    largest_O = layer.state.SCB if stored.SCB is None else stored.SCB  # the first forward pass moves them
    scale_O1 = largest_O[:, None] * (1.0 / 127.0)
    eight = torch.empty(stored.shape, dtype=dtype, device=stored.device)
    outputs = max(1, (CHUNK if stored.device.type == "cpu" else LARGE_CHUNK) // stored.shape[1])
    for chunk, values, scale in zip(
        eight.split(outputs), stored.data.split(outputs), scale_O1.split(outputs), strict=True
    ):
        chunk.copy_(values.to(torch.float32).mul_(scale))
    return eight


def _state(layer: Any) -> Any:
    """How a 4-bit weight was packed; one that processes share loses it whenever it is gathered, its layer does not."""
    return getattr(layer.weight, "quant_state", None) or getattr(layer, "quant_state", None)
