"""Influence of training rows on others by their gradients: LESS (Xia et al. 2024, arXiv:2402.04333).

A step of Adam on a row moves the trainable values along the row's direction; it lowers the loss of another row as far
as it points along that row's gradient. Both are compared by their cosine at a checkpoint of a short training.

The authors project gradients to 8,192 numbers in order to keep them for many targets. Here there is one target, of
which only the mean direction counts, so that no gradient has to be kept and nothing is lost to a projection.

Legend: P trainable values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from workbench.data.batching import Examples
from workbench.training import checkpoints
from workbench.training.trainer import Trainer

BETAS, EPS = (0.9, 0.999), 1e-8
"""Those of torch's AdamW, where the configuration names none."""


@dataclass(frozen=True)
class AdamMoments:
    """First and second moment (P,) of the gradient, as Adam has them after some steps."""

    first_P: Tensor
    second_P: Tensor
    betas: tuple[float, float] = BETAS
    eps: float = EPS

    def direction(self, gradient_P: Tensor) -> Tensor:
        """Where the next step would go with this gradient (P,), up to a factor.

        Without the bias corrections, as in the authors' code: they are the same factors for all rows.
        """
        keep_first, keep_second = self.betas
        first_P = keep_first * self.first_P + (1 - keep_first) * gradient_P
        second_P = keep_second * self.second_P + (1 - keep_second) * gradient_P**2
        return first_P / (second_P + self.eps).sqrt()


def at_checkpoint(
    trainer: Trainer, checkpoint: Path, *, rows: Examples, target: Examples, chosen: Iterable[int]
) -> Iterator[tuple[int, float]]:
    """Number of each chosen one of `rows`, and its influence on the loss of the target, from -1 to 1.

    The target is the mean of its rows' unit gradients, so that a row of few tokens counts as much as any other.

    Args:
        trainer: A training that has ended; it is left with the values of the checkpoint.
    """
    masters = trainer.masters.named()
    values, kept = (checkpoints.read_tensors(checkpoint, stem) for stem in ("trainable", "optimizer"))
    with torch.no_grad():
        for name, master in masters.items():
            master.copy_(values[name].view_as(master))
    trainer.masters.refresh()
    trainer.model.eval()
    first_P, second_P = (
        torch.cat([kept[f"{name}|{kind}"].flatten() for name in masters]).to(trainer.device)
        for kind in ("exp_avg", "exp_avg_sq")
    )
    optimizer = trainer.config.optimizer
    moments = AdamMoments(first_P, second_P, optimizer.betas or BETAS, optimizer.eps or EPS)
    gradient = _row_gradient(trainer)
    aim_P = torch.zeros_like(first_P)
    for row in range(len(target)):
        aim_P += _unit(gradient(target, row)) / len(target)
    for row in chosen:
        yield row, float(_unit(moments.direction(gradient(rows, row))) @ aim_P)


def _row_gradient(trainer: Trainer) -> Callable[[Examples, int], Tensor]:
    """Gradient (P,) of the mean loss of one row, in the order of the masters."""

    def gradient(rows: Examples, row: int) -> Tensor:
        batch = rows.batch(np.array([row])).to(trainer.device)
        trainer.masters.backward(trainer.loss(batch, 1 / int(rows.supervised[row])))
        parts = []
        for master in trainer.masters:
            parts.append(torch.zeros_like(master) if master.grad is None else master.grad)
            master.grad = None
        return torch.cat([part.flatten() for part in parts])

    return gradient


def _unit(vector_P: Tensor) -> Tensor:
    return torch.nn.functional.normalize(vector_P, dim=0)
