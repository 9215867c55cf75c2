"""Attention of short rows on CPUs, where the model computes in half precision.

torch's half-precision kernel multiplies the small matrices of short rows without the processor's units, above all in
the backward pass. Here the weights of attention are kept from the forward pass for the backward pass, and what is
multiplied by them goes through those units. Forward and backward on one core of an Intel Xeon with bfloat16 units,
12 heads of 64, in ms (torch in bfloat16 / torch in float32 / here): 5 rows of 120 tokens 24.7 / 11.6 / 6.2; 3 of 207
28.8 / 18.0 / 9.1; 1 of 512 20.6 / 26.9 / 16.1.

Legend: B rows, H heads of queries, K of keys and values, L queries, S keys, D width of a head.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from workbench.models.weight_storage import HALVES

LONGEST = 512
"""Tokens of a row from which torch's half precision is as fast."""
_LEAST = torch.finfo(torch.float32).min


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Query (B, H, L, D), key and value (B, K, S, D) to (B, L, H, D), as sdpa does."""
    settings |= {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
    if query.device.type != "cpu" or query.dtype not in HALVES or key.shape[2] >= LONGEST:
        inputs = (query, key, value, attention_mask)
        output, nothing = sdpa_attention_forward(module, *inputs, position_bias=position_bias, **settings)
        return output, nothing
    learns = position_bias is not None or (attention_mask is not None and attention_mask.requires_grad)
    if dropout or learns or query.shape[2] == 1:
        mask = attention_mask.float() if _is_half(attention_mask) else attention_mask
        bias = position_bias.float() if position_bias is not None else None  # T5's, of positions
        wide = (query.float(), key.float(), value.float(), mask)
        output, nothing = sdpa_attention_forward(module, *wide, position_bias=bias, **settings)
        return output.to(query.dtype), nothing
    causal = attention_mask is None and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    added = _causal(query.shape[2], key.shape[2]) if causal else _added(attention_mask)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = _ShortRows.apply(query, key, value, added, scale)  # type: ignore[no-untyped-call]
    return output.transpose(1, 2).contiguous(), None


class _ShortRows(torch.autograd.Function):
    """softmax(query key^T scale + added) value; scores and softmax in float32, the rest in the precision of value."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, added: Tensor | None, scale: float) -> Tensor:
        (B, H, L, D), (_, K, S, _) = query.shape, key.shape
        # The heads of queries that share keys stand beneath each other: one product for all of them.
        query = query.reshape(B * K, H // K * L, D)
        key, value = key.reshape(B * K, S, D), value.reshape(B * K, S, value.shape[-1])
        scores = torch.bmm(query.float().mul_(scale), key.float().mT)
        if added is not None:
            scores.view(B, H, L, S).add_(added)
        weights = scores.softmax(-1).to(value.dtype)
        ctx.save_for_backward(query, key, value, weights)
        ctx.scale, ctx.shape = scale, (B, H, K, L, S)
        return torch.bmm(weights, value).view(B, H, L, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, weights = ctx.saved_tensors
        B, H, K, L, S = ctx.shape
        grad = grad.reshape(B * K, H // K * L, -1)
        by_weight = torch.bmm(grad, value.mT)
        by_score = torch._softmax_backward_data(by_weight, weights, -1, weights.dtype).mul_(ctx.scale)
        return (
            torch.bmm(by_score, key).view(B, H, L, -1),
            torch.bmm(by_score.mT, query).view(B, K, S, -1),
            torch.bmm(weights.mT, grad).view(B, K, S, -1),
            None,
            None,
        )


def _causal(queries: int, keys: int) -> Tensor:
    """Added to scores, it hides later keys (L, S)."""
    return torch.full((queries, keys), _LEAST).triu_(1)


def _added(mask: Tensor | None) -> Tensor | None:
    """A mask as what is added to scores. What hides everything hides nothing: such a row's output is for nobody."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape).masked_fill_(~mask, _LEAST)
    return mask.float().clamp_min(_LEAST)


def _is_half(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dtype in HALVES
