"""Teacher signals at the supervised positions of a micro-batch, and the student's divergence from them.

Legend: D hidden, N supervised positions, n of them, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from workbench.config.sections.distill_config import DistillConfig
from workbench.data.batching import MicroBatch
from workbench.losses import divergences
from workbench.losses.chunked import Project
from workbench.losses.divergences import Divergence, log_probs


class TeacherSignal(Protocol):
    """The distributions that the student's logits are compared with, position by position."""

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Tensors whose first axis are the N positions; they are chunked with the student's hidden states."""

    @property
    def vocabulary(self) -> int:
        """Numbers that `loss` makes of each position, besides the student's logits."""

    def loss(self, logits_nV: Tensor, *tensors: Tensor) -> Tensor:
        """Summed distance of the student's logits of some positions from what those chunks of `tensors` say."""


class Teacher(Protocol):
    """A source of targets for a micro-batch: a live model, a cache, or another vocabulary."""

    def signal(self, batch: MicroBatch, config: DistillConfig, *, temperature: float) -> TeacherSignal:
        """Teacher signal at the batch's supervised positions; the batch is on the student's device."""


@dataclass(frozen=True)
class TeacherLogits:
    """Hidden states of one or several models; several are one distribution, the mean of theirs."""

    tensors: Sequence[Tensor]
    """Hidden states (N, D) of each model."""
    projects: Sequence[Project]
    """Its output head."""
    vocabularies: Sequence[int]
    config: DistillConfig
    temperature: float

    @property
    def vocabulary(self) -> int:
        """V of all models together."""
        return sum(self.vocabularies)

    def loss(self, logits_nV: Tensor, *tensors: Tensor) -> Tensor:
        """The configured divergence over the tokens that all models know.

        Heads may be padded beyond their tokenizer's tokens, each to another size; what only one has is left out.
        """
        teacher_nV = self.log_probs(tensors, vocabulary=logits_nV.shape[1])
        common = teacher_nV.shape[1]
        return divergence(self.config, self.temperature)(log_probs(logits_nV[:, :common], self.temperature), teacher_nV)

    @torch.no_grad()
    def log_probs(self, tensors: Sequence[Tensor], *, vocabulary: int) -> Tensor:
        """Log-probabilities (n, V) of all models together at a chunk of positions, over the tokens that all know."""
        common = min(vocabulary, *self.vocabularies)
        each = [
            log_probs(project(hidden)[:, :common], self.temperature)
            for project, hidden in zip(self.projects, tensors, strict=True)
        ]
        return mean_log_probs(each)


def divergence(config: DistillConfig, temperature: float) -> Divergence:
    """The configured divergence of log-probabilities at a temperature, with its factor."""
    return divergences.scaled(config.loss, temperature=temperature, beta=config.beta, skew=config.skew)


def mean_log_probs(each: Sequence[Tensor]) -> Tensor:
    """Log of the mean of several distributions, each given by its log-probabilities (..., V)."""
    if len(each) == 1:
        return each[0]
    return torch.logsumexp(torch.stack(list(each)), dim=0) - math.log(len(each))
