"""Attention on CPUs: in float32 where the model computes in half precision and rows are short.

torch's half-precision kernel multiplies the small matrices of short rows without the processor's units, above all in
the backward pass. Forward and backward on one core of an AMD EPYC with bfloat16 units, in ms (bfloat16 / through
float32): 480 heads of 16 tokens 28.4 / 2.9; 48 of 170 tokens 34.2 / 20.8; 24 of 350 tokens 41.2 / 37.9; 12 of 1,024
tokens 91 / 112.
"""

from __future__ import annotations

from typing import Any, TypeGuard

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from workbench.storage import HALVES

LONGEST = 512
"""Tokens of a row from which half precision is as fast."""


def register() -> None:
    """Let every model of this process whose attention is sdpa compute so; on accelerators nothing changes."""
    AttentionInterface.register("sdpa", _attention)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """Query (B, heads, L, D), key and value (B, key-value heads, S, D) to (B, L, heads, D), as sdpa does."""
    dtype = query.dtype
    if query.device.type != "cpu" or dtype not in HALVES or key.shape[2] >= LONGEST:
        output, nothing = sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
        return output, nothing
    # T5 adds its bias of positions as an argument of its own.
    wide: dict[str, Any] = {name: each.float() if _is_half(each) else each for name, each in settings.items()}
    mask = attention_mask.float() if _is_half(attention_mask) else attention_mask
    output, nothing = sdpa_attention_forward(module, query.float(), key.float(), value.float(), mask, **wide)
    return output.to(dtype), nothing


def _is_half(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dtype in HALVES
