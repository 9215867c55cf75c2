"""Cross-entropy of next tokens at supervised positions.

Legend: D hidden, N supervised positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.losses import r_drop as r_drops
from workbench.losses.chunked_loss import Project, chunked, chunks, on_cpu, wanted_parts, wide
from workbench.losses.label_losses import LabelLosses, LabelTap

NO_LABEL = -100  # label of a position at which nothing is to be predicted
CPU_MULTIPLE = 64  # numbers of positions are rounded up to a multiple of this on a CPU
CACHED_ELEMENTS = 2**20
"""Logits whose softmax and gradient a CPU computes at once; 4 MiB in float32, which stay in its caches."""


def next_token(
    hidden_ND: Tensor,
    labels_N: Tensor,
    project: Project,
    *,
    vocabulary: int,
    weights: list[Tensor],
    scale: float,
    factor_N: Tensor | None = None,
    tap: LabelTap | None = None,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    r_drop: float = 0.0,
    draw_N: Tensor | None = None,
) -> Tensor:
    """Sum over the N positions of -log p(label), times `scale`, in nats; see `chunked` for the arguments.

    Equal to `F.cross_entropy(project(hidden), labels, reduction="sum") * scale`.

    Args:
        factor_N: Factor of the loss of each position; None: 1.
        tap: Sees the log-probabilities and labels of each chunk; it changes nothing.
        smoothing: Share of the target that all of the vocabulary get alike.
        z_loss: Factor of the squared log of the softmax's denominator, which is added.
        r_drop: Strength of R-Drop, for hidden states (N, 2, D) of two passes.
        draw_N: Numbers that draw other labels from what is predicted, without smoothing or z-loss; None: those given.

    Returns:
        Scalar, float32 or wider.
    """
    if on_cpu(hidden_ND.device):
        hidden_ND, labels_N, factor_N, draw_N = _rounded_up(hidden_ND, labels_N, factor_N, draw_N)
    if draw_N is not None:
        targets = [labels_N, draw_N] if factor_N is None else [labels_N, draw_N, factor_N]
        return chunked(
            hidden_ND,
            targets,
            partial(drawn_cross_entropy, tap=tap),
            project,
            vocabulary=vocabulary,
            weights=weights,
            scale=scale,
        )
    criterion = CrossEntropy(smoothing, z_loss, tap)
    targets = [labels_N] if factor_N is None else [labels_N, factor_N]
    if hidden_ND.ndim == 2:
        return chunked(hidden_ND, targets, criterion, project, vocabulary=vocabulary, weights=weights, scale=scale)
    both = partial(_of_two_passes, criterion=criterion, strength=r_drop)
    pairs = r_drops.project_pairs(project)
    return chunked(hidden_ND, targets, both, pairs, vocabulary=2 * vocabulary, weights=weights, scale=scale)


@dataclass(frozen=True)
class CrossEntropy:
    """The summed loss of logits (N, V), and in closed form its gradient; see `next_token` for the settings.

    With p = softmax(logits), Z the log of its denominator, and a factor f of a position, the gradient is
    f ((1 + 2 z Z) p - (1 - s) onehot(label) - s / V), for smoothing s and z-loss z.
    """

    smoothing: float = 0.0
    z_loss: float = 0.0
    tap: LabelTap | None = None

    def __call__(self, logits_NV: Tensor, labels_N: Tensor, factor_N: Tensor | None = None) -> Tensor:
        """Written as it is read, for losses that combine it with others."""
        logits_NV = logits_NV.to(wide(logits_NV.dtype))
        log_p_NV = F.log_softmax(logits_NV, dim=-1)
        if self.tap is not None:
            self.tap.see(log_p_NV, labels_N)
        loss_N = F.nll_loss(log_p_NV, labels_N, reduction="none", ignore_index=NO_LABEL)
        if self.smoothing:
            loss_N = torch.lerp(loss_N, -log_p_NV.mean(-1), self.smoothing)
        if self.z_loss:
            loss_N = loss_N + self.z_loss * (logits_NV[:, 0] - log_p_NV[:, 0]) ** 2
        loss_N = loss_N.masked_fill(labels_N == NO_LABEL, 0)
        return loss_N.sum() if factor_N is None else loss_N @ factor_N.to(loss_N.dtype)

    def with_gradient(
        self, logits_NV: Tensor, labels_N: Tensor, factor_N: Tensor | None = None, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """The loss times `scale`, and its gradient, rounded once from float32 where the logits are in half precision.

        A CPU computes a few positions at a time, whose float32 values stay in its cache from one pass to the next.
        """
        factor_N = (labels_N != NO_LABEL) * (scale if factor_N is None else factor_N * scale)
        factor_N = factor_N.to(wide(logits_NV.dtype))
        gradient_NV, loss = torch.empty_like(logits_NV), factor_N.new_zeros(())
        rows = CACHED_ELEMENTS // logits_NV.shape[1] if on_cpu(logits_NV.device) else len(logits_NV)
        own = LabelLosses(torch.empty_like(factor_N), torch.empty_like(labels_N, dtype=torch.bool))
        tensors = (logits_NV, labels_N.clamp_min(0), factor_N, gradient_NV, *own)
        for part in wanted_parts(list(zip(*(tensor.split(max(1, rows)) for tensor in tensors), strict=True))):
            loss += self._fill(*part)
        if self.tap is not None:
            self.tap.take(own)
        return loss, gradient_NV

    def _fill(
        self,
        logits_NV: Tensor,
        labels_N: Tensor,
        factor_N: Tensor,
        gradient_NV: Tensor,
        own_loss_N: Tensor,
        right_N: Tensor,
    ) -> Tensor:
        """Write the gradient of a few positions, which all have a label, and what a tap reads; returns their loss."""
        label_N1, factor_N1 = labels_N[:, None], factor_N[:, None]
        # One array for logits, probabilities and gradients, in passes that overwrite each other.
        values_NV = gradient_NV if gradient_NV.dtype == factor_N.dtype else factor_N.new_empty(logits_NV.shape)
        most_N1 = values_NV.copy_(logits_NV).amax(-1, keepdim=True)
        values_NV -= most_N1
        own_N1 = values_NV.gather(1, label_N1)
        target_N1 = (1 - self.smoothing) * own_N1
        if self.smoothing:
            target_N1 += self.smoothing * values_NV.mean(-1, keepdim=True)
        sum_N1 = values_NV.exp_().sum(-1, keepdim=True)
        log_sum_N1 = sum_N1.log()
        denominator_N1 = log_sum_N1 + most_N1
        loss_N1 = log_sum_N1 - target_N1 + self.z_loss * denominator_N1**2
        values_NV.mul_(factor_N1 * (1 + 2 * self.z_loss * denominator_N1) / sum_N1)
        if self.smoothing:
            values_NV -= factor_N1 * (self.smoothing / logits_NV.shape[1])
        values_NV.scatter_add_(1, label_N1, (self.smoothing - 1) * factor_N1)
        if values_NV is not gradient_NV:
            gradient_NV.copy_(values_NV)
        torch.sub(log_sum_N1[:, 0], own_N1[:, 0], out=own_loss_N)
        torch.ge(own_N1[:, 0], 0, out=right_N)
        return (loss_N1 * factor_N1).sum()


def _of_two_passes(
    logits_N2V: Tensor,
    labels_N: Tensor,
    factor_N: Tensor | None = None,
    *,
    criterion: CrossEntropy,
    strength: float,
) -> Tensor:
    """Mean loss of both passes, and how far they disagree; a tap hears the first."""
    first_NV, second_NV = logits_N2V.unbind(1)
    losses = criterion(first_NV, labels_N, factor_N) + replace(criterion, tap=None)(second_NV, labels_N, factor_N)
    counts_N = (labels_N != NO_LABEL).to(losses.dtype)
    counts_N = counts_N if factor_N is None else counts_N * factor_N.to(losses.dtype)
    return losses / 2 + strength * (r_drops.disagreement(first_NV, second_NV) @ counts_N)


def _rounded_up(
    hidden_ND: Tensor, labels_N: Tensor, *others: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Add positions without a label: a CPU compiles a matrix product for each number of positions.

    That takes 30 ms for 32,000 words at width 768 in bfloat16, as long as the product of 300 positions.
    """
    more = -len(labels_N) % CPU_MULTIPLE
    factor_N, draw_N = (None if each is None else F.pad(each, (0, more)) for each in others)
    return (
        F.pad(hidden_ND, (*(0, 0) * (hidden_ND.ndim - 1), 0, more)),
        F.pad(labels_N, (0, more), value=NO_LABEL),
        factor_N,
        draw_N,
    )


def drawn_cross_entropy(
    logits_NV: Tensor,
    labels_N: Tensor,
    number_N: Tensor,
    factor_N: Tensor | None = None,
    *,
    tap: LabelTap | None = None,
) -> Tensor:
    """Sum of -log p(drawn label), where a label is the first whose cumulated probability is above its number.

    Args:
        labels_N: Those of the rows: a position without one has none drawn either.
        number_N: From `LabelDraws.numbers`.
        factor_N: Factor of the loss of each position; None: 1.
        tap: Sees the log-probabilities and the labels of the rows.
    """
    log_p_NV = F.log_softmax(logits_NV.to(wide(logits_NV.dtype)), dim=-1)
    if tap is not None:
        tap.see(log_p_NV, labels_N)
    with torch.no_grad():
        cumulated_NV = log_p_NV.exp().cumsum(-1)
        wanted_N1 = (number_N.to(cumulated_NV.dtype) * cumulated_NV[:, -1])[:, None]
        drawn_N = torch.searchsorted(cumulated_NV, wanted_N1, right=True)[:, 0].clamp_max(logits_NV.shape[1] - 1)
        drawn_N = drawn_N.masked_fill(labels_N == NO_LABEL, NO_LABEL)
    loss_N = F.nll_loss(log_p_NV, drawn_N, reduction="none", ignore_index=NO_LABEL)
    return loss_N.sum() if factor_N is None else loss_N @ factor_N.to(loss_N.dtype)


def cross_entropy(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """Sum of -log p(label) over the positions that have one, in nats, float32 or wider."""
    return F.cross_entropy(logits_NV.to(wide(logits_NV.dtype)), labels_N, reduction="sum", ignore_index=NO_LABEL)


@torch.no_grad()
def token_scores(hidden_ND: Tensor, labels_N: Tensor, project: Project, *, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood (N,) float32 in nats, and whether the label is the most likely token (N,) bool."""
    losses_N = torch.empty(len(labels_N), device=labels_N.device)
    hits_N = torch.empty_like(labels_N, dtype=torch.bool)
    for hidden, labels, losses, hits in wanted_parts(chunks(vocabulary, hidden_ND, labels_N, losses_N, hits_N)):
        logits = project(hidden).float()
        losses.copy_(F.cross_entropy(logits, labels, reduction="none"))
        torch.eq(logits.argmax(-1), labels, out=hits)
    return losses_N, hits_N
