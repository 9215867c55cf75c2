"""Cross-entropy of next tokens at supervised positions.

Legend: D hidden, N supervised positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.losses import r_drop as r_drops
from workbench.losses.chunked import Project, chunked, chunks, wide
from workbench.losses.label_losses import LabelTap

NO_LABEL = -100
"""Label of a position at which nothing is to be predicted."""
CPU_MULTIPLE = 64
"""Numbers of positions are rounded up to a multiple of this on a CPU."""


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
    if hidden_ND.device.type == "cpu":
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
    criterion = partial(_criterion, smoothing=smoothing, z_loss=z_loss)
    targets = [labels_N] if factor_N is None else [labels_N, factor_N]
    if hidden_ND.ndim == 2:
        tapped = partial(criterion, tap=tap)
        return chunked(hidden_ND, targets, tapped, project, vocabulary=vocabulary, weights=weights, scale=scale)
    both = partial(_of_two_passes, criterion=criterion, tap=tap, strength=r_drop)
    pairs = r_drops.project_pairs(project)
    return chunked(hidden_ND, targets, both, pairs, vocabulary=2 * vocabulary, weights=weights, scale=scale)


def _criterion(
    logits_NV: Tensor,
    labels_N: Tensor,
    factor_N: Tensor | None = None,
    *,
    smoothing: float,
    z_loss: float,
    tap: LabelTap | None = None,
) -> Tensor:
    # The two steps of F.cross_entropy, to the same bits: a tap costs no third pass over the vocabulary.
    log_p_NV = F.log_softmax(logits_NV.to(wide(logits_NV.dtype)), dim=-1)
    if tap is not None:
        tap.see(log_p_NV, labels_N)
    if smoothing or z_loss:
        loss_N = _regularised(logits_NV.to(log_p_NV.dtype), log_p_NV, labels_N, smoothing, z_loss)
        return loss_N.sum() if factor_N is None else loss_N @ factor_N.to(loss_N.dtype)
    if factor_N is None:
        return F.nll_loss(log_p_NV, labels_N, reduction="sum", ignore_index=NO_LABEL)
    return (F.nll_loss(log_p_NV, labels_N, reduction="none", ignore_index=NO_LABEL) * factor_N).sum()


def _of_two_passes(
    logits_N2V: Tensor,
    labels_N: Tensor,
    factor_N: Tensor | None = None,
    *,
    criterion: Callable[..., Tensor],
    tap: LabelTap | None,
    strength: float,
) -> Tensor:
    """Mean loss of both passes, and how far they disagree; a tap hears the first."""
    first_NV, second_NV = logits_N2V.unbind(1)
    losses = criterion(first_NV, labels_N, factor_N, tap=tap) + criterion(second_NV, labels_N, factor_N)
    counts_N = (labels_N != NO_LABEL).to(losses.dtype)
    counts_N = counts_N if factor_N is None else counts_N * factor_N.to(losses.dtype)
    return losses / 2 + strength * (r_drops.disagreement(first_NV, second_NV) @ counts_N)


def _regularised(logits_NV: Tensor, log_p_NV: Tensor, labels_N: Tensor, smoothing: float, z_loss: float) -> Tensor:
    """Loss (N,) of smoothed targets, with the z-loss."""
    loss_N = F.nll_loss(log_p_NV, labels_N, reduction="none", ignore_index=NO_LABEL)
    loss_N = torch.lerp(loss_N, -log_p_NV.mean(-1), smoothing)
    denominator_N = (logits_NV[:, 0] - log_p_NV[:, 0]) if z_loss else torch.zeros_like(loss_N)
    return (loss_N + z_loss * denominator_N**2).masked_fill(labels_N == NO_LABEL, 0)


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
    losses, hits = [], []
    for hidden, labels in chunks(vocabulary, hidden_ND, labels_N):
        logits = project(hidden).float()
        losses.append(F.cross_entropy(logits, labels, reduction="none"))
        hits.append(logits.argmax(-1) == labels)
    return torch.cat(losses), torch.cat(hits)
