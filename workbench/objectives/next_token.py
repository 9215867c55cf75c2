"""Next-token cross-entropy of the supervised positions only, projected to the vocabulary in chunks.

Legend: B batch, L sequence, D hidden, N supervised positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK_ELEMENTS = 2**24
"""Logits that exist at once; 64 MiB in float32."""

Project = Callable[[Tensor], Tensor]
"""Hidden states (n, D) to logits (n, V)."""


def next_token(
    hidden_ND: Tensor, labels_N: Tensor, project: Project, *, vocabulary: int, weights: list[Tensor], scale: float
) -> Tensor:
    """Sum over the N positions of -log p(label), times `scale`, in nats.

    The gradient is computed in the forward pass, chunk by chunk, so the logits of a chunk are projected
    once and never stored. Equal to `F.cross_entropy(project(hidden), labels, reduction="sum") * scale`.

    Args:
        hidden_ND: Hidden states in front of the output head.
        labels_N: The token that follows each of them.
        project: The output head. Reads no trainable tensor besides `weights`.
        vocabulary: V, which decides how many positions make a chunk.
        weights: The head's trainable tensors; empty where it is frozen.
        scale: 1 / supervised tokens of the global batch.

    Returns:
        Scalar float32.
    """
    loss: Tensor = _ChunkedCrossEntropy.apply(hidden_ND, labels_N, project, vocabulary, scale, *weights)  # type: ignore[no-untyped-call]
    return loss


@torch.no_grad()
def token_scores(hidden_ND: Tensor, labels_N: Tensor, project: Project, *, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood (N,) float32 in nats, and whether the label is the most likely token (N,) bool."""
    losses, hits = [], []
    for hidden, labels in _chunks(hidden_ND, labels_N, vocabulary):
        logits = project(hidden).float()
        losses.append(F.cross_entropy(logits, labels, reduction="none"))
        hits.append(logits.argmax(-1) == labels)
    return torch.cat(losses), torch.cat(hits)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, labels_N: Tensor, project: Project, vocabulary: int, scale: float, *weights: Tensor
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden_ND.device)
        hidden_grad = torch.empty_like(hidden_ND)
        weight_grads = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
        start = 0
        for hidden, labels in _chunks(hidden_ND, labels_N, vocabulary):
            with torch.enable_grad():
                hidden = hidden.detach().requires_grad_()
                loss = F.cross_entropy(project(hidden).float(), labels, reduction="sum") * scale
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
        return hidden_grad * grad, None, None, None, None, *(g * grad for g in weight_grads)


def _chunks(hidden_ND: Tensor, labels_N: Tensor, vocabulary: int) -> list[tuple[Tensor, Tensor]]:
    rows = max(1, CHUNK_ELEMENTS // vocabulary)
    return list(zip(hidden_ND.split(rows), labels_N.split(rows), strict=True))
