"""Loss of a classifier on teacher outputs and labels, and rows that carry both.

Legend: B rows of a micro-batch, N rows, C outputs (classes, or 1 for a number), G questions that a row answers (1, or
one for each class where a row has several), E answers to each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from workbench.config import RunConfig
from workbench.config.sections.classes_config import Kind
from workbench.config.sections.distill_config import DistillConfig, at
from workbench.data.batching import Examples, Indices
from workbench.data.labelled.class_sampling import ClassBalancedRows, MixedLabelledRows, RepeatedRows, sampled_rows
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.data.labelled.labels import Floats
from workbench.losses.class_losses import squared_error
from workbench.losses.criterion import Objective
from workbench.losses.divergences import log_probs, scaled


def soft_criterion(
    hard: Objective, kind: Kind, config: DistillConfig, *, classes: int, progress: Callable[[], float]
) -> Objective:
    """(1 - alpha) * `hard` of the rows that have labels + alpha * divergence from the teacher of all rows.

    Its labels (B, 2 + 2C) are a row's weight, which multiplies both parts, its targets, the teacher's outputs, and
    whether it has a label (1 or 0), as `with_teacher` rows give them.

    Args:
        hard: The loss of the labels.
        classes: C.
        progress: Share of the run that is done, for what follows a schedule.
    """

    def objective(outputs_BC: Tensor, labels_B: Tensor, scale: float) -> Tensor:
        alpha, temperature = at(config.alpha, progress()), at(config.temperature, progress())
        weight_B1, target_BC, teacher_BC, labelled_B1 = labels_B.split([1, classes, classes, 1], dim=1)
        total = outputs_BC.new_zeros((), dtype=torch.float32)
        if alpha < 1:
            # A row of weight 0 moves nothing, whatever its targets are.
            total = total + (1 - alpha) * hard(outputs_BC, torch.cat([weight_B1 * labelled_B1, target_BC], 1), scale)
        if alpha > 0:
            soft = divergence(kind, config, outputs_BC, teacher_BC, weight_B1[:, 0], temperature=temperature)
            total = total + alpha * soft * scale
        return total

    return objective


def divergence(
    kind: Kind, config: DistillConfig, outputs_BC: Tensor, teacher_BC: Tensor, weight_B: Tensor, *, temperature: float
) -> Tensor:
    """Sum over the rows of weight * the configured divergence, its factor for the temperature included.

    Several classes are as many questions, yes or no. Numbers have no temperature: theirs is the squared error.
    """
    if kind == "number":
        return squared_error(outputs_BC, teacher_BC, weight_B)
    between = scaled(config.loss, temperature=temperature, beta=config.beta, skew=config.skew)
    student_BGE, said_BGE = (log_probs(_questions(kind, each), temperature) for each in (outputs_BC, teacher_BC))
    # A divergence sums over its rows; mapped over them it gives each its own, to be weighted.
    each_B: Tensor = torch.vmap(between)(student_BGE, said_BGE)
    return (each_B * weight_B).sum()


def with_teacher(rows: LabelledSet, outputs_NC: Floats, *, labelled: bool) -> LabelledSet:
    """Rows that carry what a teacher says of them, and whether their own targets are labels."""
    known_N1 = np.full((len(rows), 1), float(labelled))
    return replace(rows, extra_targets_NC=np.concatenate([outputs_NC, known_N1], axis=1).astype(np.float32))


def examples(config: RunConfig, train: LabelledSet, extra: LabelledSet | None) -> Examples:
    """Training rows drawn as `classes` or `data.sources` say, and further rows, each drawn once in an epoch."""
    first = sampled_rows(train, config)
    if extra is None:
        return first
    assert not isinstance(first, MixedLabelledRows), "distill.unlabelled beside data.sources is refused"
    if isinstance(first, LabelledSet):
        return first.concatenated(extra)
    return MixedSampling(train.concatenated(extra), first)


@dataclass(frozen=True, eq=False)
class MixedSampling(RepeatedRows):
    """Rows of which the first are drawn by a rule of their own, and all others once each in an epoch."""

    first: ClassBalancedRows
    """Draws among the first rows."""

    def __len__(self) -> int:
        return len(self.first) + len(self.rows) - len(self.first.rows)

    def table(self, epoch: int) -> Indices:
        """The number of each draw of an epoch (M,): those of `first` come first."""
        first = self.first
        own_M = first.row_of(first.sample(np.arange(len(first)), epoch=epoch))
        row_M = np.concatenate([own_M, np.arange(len(first.rows), len(self.rows))])
        return self.numbers(row_M, seed=first.seed, epoch=epoch)

    @property
    def most_draws(self) -> int:
        """Times that an epoch draws a row of `first` at most."""
        return self.first.most_draws


def _questions(kind: Kind, outputs_BC: Tensor) -> Tensor:
    """Logits (B, G, E): which class, or of each class whether it is there, of which no is 0."""
    if kind == "several":
        return torch.stack([outputs_BC, torch.zeros_like(outputs_BC)], dim=-1)
    return outputs_BC[:, None]
