"""Loss of each label, beside the sum that trains: what a training tells of single rows.

Nothing here has a gradient, and nothing is computed where nobody listens.

Legend: N labels, C classes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.config.sections.classes_config import Kind


class LabelLosses(NamedTuple):
    """Losses of labels, in their order: tokens that carry loss, or one label for each row."""

    loss_N: Tensor
    """-log p(label) in nats, without weights, smoothing or focus; squared error for numbers. float32."""
    right_N: Tensor
    """Whether the label is the likeliest, bool; of several classes whether all are right, False for numbers."""


LabelScorer = Callable[[Tensor, Tensor], LabelLosses]
"""Outputs (N, ...) and labels (N, ...) to their losses."""


class LabelTap:
    """Hands on the losses of the labels that a loss function sees, part by part, while somebody listens."""

    def __init__(self, score: LabelScorer) -> None:
        self._score = score
        self._parts: list[LabelLosses] | None = None

    @contextmanager
    def listening(self) -> Iterator[list[LabelLosses]]:
        """Inside the block, what is seen goes into the list."""
        self._parts = []
        try:
            yield self._parts
        finally:
            self._parts = None

    def see(self, outputs: Tensor, labels: Tensor) -> None:
        """Called by a loss function with all that it computes with."""
        if self._parts is not None:
            self._parts.append(self._score(outputs, labels))

    def take(self, losses: LabelLosses) -> None:
        """Called in the place of `see` by a loss function that has computed these on its way."""
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
