"""Log-probabilities and entropies of tokens, in chunks: what a loss that is no sum over tokens is computed from.

Legend: D hidden, N supervised positions, n of them, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.losses.chunked_loss import Project, chunks, on_cpu, wide
from workbench.losses.next_token import CPU_MULTIPLE, NO_LABEL

OfLogits = Callable[[Tensor, Tensor], Tensor]
"""Logits (n, V) and labels (n,) to a number (n,) of each position."""


def token_log_probs(
    hidden_ND: Tensor, labels_N: Tensor, project: Project, *, vocabulary: int, weights: list[Tensor]
) -> Tensor:
    """log p(label) (N,) in nats, float32 or wider; the logits of all positions never exist at once.

    Each position's gradient is that of its own logits times one number. So it is computed in the forward pass and
    multiplied in the backward pass; where the head trains, its logits are computed a second time there.

    Args:
        hidden_ND: Hidden states in front of the output head.
        labels_N: The predicted tokens.
        project: The output head. Uses no trainable tensor besides `weights`.
        vocabulary: V, decides how large a chunk is.
        weights: The head's trainable tensors; none where it is frozen.
    """
    return _by_token(_log_probs, hidden_ND, labels_N, project, vocabulary=vocabulary, weights=weights)


def token_entropies(hidden_ND: Tensor, project: Project, *, vocabulary: int, weights: list[Tensor]) -> Tensor:
    """Entropy (N,) in nats of the distribution that each position predicts, float32 or wider; see `token_log_probs`."""
    labels_N = torch.zeros(len(hidden_ND), dtype=torch.int64, device=hidden_ND.device)  # of which it has no use
    return _by_token(_entropies, hidden_ND, labels_N, project, vocabulary=vocabulary, weights=weights)


def _by_token(
    value: OfLogits, hidden_ND: Tensor, labels_N: Tensor, project: Project, *, vocabulary: int, weights: list[Tensor]
) -> Tensor:
    count = len(labels_N)
    if on_cpu(hidden_ND.device):  # see `next_token`: a CPU compiles a product for each number of positions
        more = -count % CPU_MULTIPLE
        hidden_ND, labels_N = F.pad(hidden_ND, (0, 0, 0, more)), F.pad(labels_N, (0, more), value=NO_LABEL)
    if any(hasattr(weight, "ds_id") for weight in weights):  # DeepSpeed ZeRO 3, as in `chunked`
        return value(project(hidden_ND), labels_N)[:count]
    found_N: Tensor = _ByToken.apply(value, hidden_ND, labels_N, project, vocabulary, *weights)  # type: ignore[no-untyped-call]
    return found_N[:count]


def _log_probs(logits_nV: Tensor, labels_n: Tensor) -> Tensor:
    """log p(label) (n,); 0 without a label."""
    log_p_nV = F.log_softmax(logits_nV.to(wide(logits_nV.dtype)), dim=-1)
    return -F.nll_loss(log_p_nV, labels_n, reduction="none", ignore_index=NO_LABEL)


def _entropies(logits_nV: Tensor, labels_n: Tensor) -> Tensor:
    """Entropies (n,); a token of probability 0 adds nothing, to the gradient either."""
    log_p_nV = F.log_softmax(logits_nV.to(wide(logits_nV.dtype)), dim=-1)
    log_p_nV = log_p_nV.clamp_min(torch.finfo(log_p_nV.dtype).min)
    return -(log_p_nV.exp() * log_p_nV).sum(-1)


class _ByToken(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        value: OfLogits,
        hidden_ND: Tensor,
        labels_N: Tensor,
        project: Project,
        vocabulary: int,
        *weights: Tensor,
    ) -> Tensor:
        found: list[Tensor] = []
        gradients: list[Tensor] = []
        ahead = ctx.needs_input_grad[1] and not weights
        for hidden, labels in chunks(vocabulary, hidden_ND, labels_N):
            with torch.set_grad_enabled(ahead):
                hidden = hidden.detach().requires_grad_(ahead)
                value_n = value(project(hidden), labels)
                gradients += torch.autograd.grad(value_n.sum(), [hidden]) if ahead else []
            found.append(value_n.detach())
        # Saved tensors only, whose second use autograd refuses.
        ctx.save_for_backward(*([torch.cat(gradients)] if ahead else [hidden_ND, labels_N, *weights]))
        ctx.again = None if ahead else (value, project, vocabulary)
        return torch.cat(found)

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.again is None:
            (gradient_ND,) = ctx.saved_tensors
            return None, (gradient_ND * grad_N[:, None]).to(gradient_ND.dtype), None, None, None
        hidden_ND, labels_N, *weights = ctx.saved_tensors
        value, project, vocabulary = ctx.again
        hidden_grad, sums = [], [torch.zeros_like(weight, dtype=wide(weight.dtype)) for weight in weights]
        for hidden, labels, grad in chunks(vocabulary, hidden_ND, labels_N, grad_N):
            with torch.enable_grad():
                hidden = hidden.detach().requires_grad_()
                value_n = value(project(hidden), labels)
            own, *others = torch.autograd.grad(value_n, [hidden, *weights], grad, allow_unused=True)
            hidden_grad.append(own)
            for sum_, other in zip(sums, others, strict=True):
                if other is not None:
                    sum_ += other
        grads = (sum_.to(weight.dtype) for sum_, weight in zip(sums, weights, strict=True))
        return None, torch.cat(hidden_grad), None, None, None, *grads
