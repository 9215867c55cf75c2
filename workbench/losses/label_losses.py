"""Loss of each label, recorded beside the sum that trains, and labels sampled from the model's own predictions.

Recording has no gradient, and costs nothing while nobody listens. Sampled labels, for estimates of curvature, are a
function of seed, step, row and token alone, whichever rows share a micro-batch.

Legend: B rows, L length, N labels, C classes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.adapters.row_dropout import row_hash, row_keys
from workbench.config.sections.classes_config import Kind

_PLACE = 0x50F1A  # keeps these random numbers apart from those of dropout masks


class LabelLosses(NamedTuple):
    """Losses of labels, in their order: tokens that carry loss, or one label for each row."""

    loss_N: Tensor
    """-log p(label) in nats, without weights, smoothing or focus; squared error for numbers. float32."""
    right_N: Tensor
    """Whether the label is the likeliest, bool; of several classes whether all are right, False for numbers."""


LabelScorer = Callable[[Tensor, Tensor], LabelLosses]  # outputs (N, ...) and labels (N, ...) to their losses


class LabelTap:
    """Records the losses of the labels that a loss function sees, part by part, while somebody listens."""

    def __init__(self, score: LabelScorer) -> None:
        self._score = score
        self._parts: list[LabelLosses] | None = None

    @contextmanager
    def listening(self) -> Iterator[list[LabelLosses]]:
        """Inside the block, losses are appended to the list."""
        self._parts = []
        try:
            yield self._parts
        finally:
            self._parts = None

    def see(self, outputs: Tensor, labels: Tensor) -> None:
        """Record the losses of outputs and labels; called by a loss function."""
        if self._parts is not None:
            self._parts.append(self._score(outputs, labels))

    def take(self, losses: LabelLosses) -> None:
        """Record losses that a loss function has computed already."""
        if self._parts is not None:
            self._parts.append(losses)


@torch.no_grad()
def token_losses(log_p_NV: Tensor, labels_N: Tensor) -> LabelLosses:
    """Losses of tokens from log-probabilities (N, V); positions without a label mean nothing."""
    own_N = log_p_NV.detach().gather(1, labels_N.clamp_min(0)[:, None])[:, 0]
    return LabelLosses(-own_N, own_N >= log_p_NV.detach().amax(-1))


def class_losses(kind: Kind) -> LabelScorer:
    """Losses of rows from outputs (N, C) and their weights and targets (N, 1 + C)."""

    @torch.no_grad()
    def score(outputs_NC: Tensor, labels_N: Tensor) -> LabelLosses:
        outputs_NC, target_NC = outputs_NC.detach().float(), labels_N[:, 1:].float()
        if kind == "number":
            loss_N = ((outputs_NC - target_NC) ** 2).sum(-1)
            return LabelLosses(loss_N, torch.zeros_like(loss_N, dtype=torch.bool))
        if kind == "several":
            loss_NC = F.binary_cross_entropy_with_logits(outputs_NC, target_NC, reduction="none")
            return LabelLosses(loss_NC.sum(-1), ((outputs_NC >= 0) == (target_NC > 0.5)).all(-1))
        loss_N = -(target_NC * outputs_NC.log_softmax(-1)).sum(-1)
        return LabelLosses(loss_N, outputs_NC.argmax(-1) == target_NC.argmax(-1))

    return score


class LabelDraws:
    """Decides whether a loss replaces the rows' labels by sampled ones."""

    def __init__(self) -> None:
        self._on = False

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Inside the block labels are sampled."""
        self._on = True
        try:
            yield
        finally:
            self._on = False

    def numbers(self, positions_N: Tensor, *, tokens: int) -> Tensor | None:
        """A random number in [0, 1) for each label of the current rows (N,), float32; None outside of `drawing`.
        `positions_N`: flat places of the labels in the rows (B * L). `tokens`: L."""
        if not self._on:
            return None
        keys_B = row_keys()
        assert keys_B is not None, "rows compute inside of `drawing`"
        hash_BL = row_hash(keys_B, _PLACE, tokens=tokens, units=1)[..., 0]
        even_N = (hash_BL.flatten()[positions_N] >> 8).float() * 2**-24 + 0.5  # the 24 bits that a float32 holds
        return even_N.clamp_(0, 1 - 2**-24)
