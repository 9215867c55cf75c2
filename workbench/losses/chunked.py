"""A loss over the vocabulary, of supervised positions only, in chunks: a whole batch's logits never exist at once.

Legend: D hidden, N supervised positions, n of them, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 2**24
"""Logits that exist at once; 64 MiB in float32."""

Project = Callable[[Tensor], Tensor]
"""Hidden states (n, D) to logits (n, V)."""

Criterion = Callable[..., Tensor]
"""Logits (n, V) and what else is known of these positions, tensors (n, ...), to their summed loss."""


def chunked(
    hidden_ND: Tensor,
    known: Sequence[Tensor],
    criterion: Criterion,
    project: Project,
    *,
    vocabulary: int,
    weights: list[Tensor],
    scale: float,
) -> Tensor:
    """`criterion(project(hidden_ND), *known) * scale`, computed a chunk of positions after the other.

    The gradient is computed in the forward pass, so the logits of a chunk are projected once and never stored.

    Args:
        hidden_ND: Hidden states in front of the output head.
        known: Tensors (N, ...) that are cut into the same chunks: labels, what a teacher says. No gradient flows there.
        project: The output head. Reads no trainable tensor besides `weights`.
        vocabulary: V, or the V of all models together that `criterion` projects to; decides how large a chunk is.
        weights: The head's trainable tensors; none where it is frozen.
        scale: 1 / supervised tokens of the global batch.

    Returns:
        Scalar, float32 or wider.
    """
    if any(hasattr(weight, "ds_id") for weight in weights):
        # DeepSpeed cut them: they are whole where the head is called and where its gradient is computed, nowhere else.
        return criterion(project(hidden_ND), *known) * scale
    loss: Tensor = _Chunked.apply(hidden_ND, tuple(known), criterion, project, vocabulary, scale, *weights)  # type: ignore[no-untyped-call]
    return loss


def chunks(vocabulary: int, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Tensors (N, ...) cut alike, so that a chunk of logits over `vocabulary` stays small."""
    rows = max(1, CHUNK_ELEMENTS // vocabulary)
    return list(zip(*(tensor.split(rows) for tensor in tensors), strict=True))


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        known: tuple[Tensor, ...],
        criterion: Criterion,
        project: Project,
        vocabulary: int,
        scale: float,
        *weights: Tensor,
    ) -> Tensor:
        total = torch.zeros((), dtype=wide(hidden_ND.dtype), device=hidden_ND.device)
        hidden_grad = torch.empty_like(hidden_ND)
        weight_grads = [torch.zeros_like(weight, dtype=wide(weight.dtype)) for weight in weights]
        start = 0
        for hidden, *beside in chunks(vocabulary, hidden_ND, *known):
            with torch.enable_grad():
                hidden = hidden.detach().requires_grad_()
                loss = criterion(project(hidden), *beside) * scale
                grads = torch.autograd.grad(loss, [hidden, *weights])
            hidden_grad[start : start + len(hidden)] = grads[0]
            for sum_, grad in zip(weight_grads, grads[1:], strict=True):
                sum_ += grad
            total += loss.detach()
            start += len(hidden)
        ctx.save_for_backward(hidden_grad, *(g.to(w.dtype) for g, w in zip(weight_grads, weights, strict=True)))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, *weight_grads = ctx.saved_tensors
        return hidden_grad * grad, None, None, None, None, None, *(g * grad for g in weight_grads)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Precision of sums: float32, or float64 where that is given."""
    return torch.promote_types(dtype, torch.float32)
