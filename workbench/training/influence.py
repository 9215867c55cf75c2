"""Influence of training rows on others by their gradients: LESS (Xia et al. 2024, arXiv:2402.04333).

A step of Adam on a row moves the trainable values in some direction; it lowers the loss of another row as far as this
direction agrees with that row's gradient. Both are compared by their cosine, at a checkpoint of a short training.

The target may have parts, such as its classes: a row is compared with the mean direction of each part, so that rows are
found that help only one. The authors project all gradients to 8,192 numbers to keep them; here only the mean directions
are kept, and nothing is projected while these fit in half a gigabyte.

Legend: P trainable values, S of them or of their sums, T target rows, G parts of the target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workbench.data.batching import Examples
from workbench.training import checkpoints
from workbench.training.trainer import Trainer

BETAS, EPS = (0.9, 0.999), 1e-8
"""Defaults of torch's AdamW, where the configuration sets none."""
KEPT = 2**27
"""Most values in the mean directions of all parts together: half a gigabyte."""
Members = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class AdamMoments:
    """First and second moment (P,) of the gradient, as Adam has them after some steps."""

    first_P: Tensor
    second_P: Tensor
    betas: tuple[float, float] = BETAS
    eps: float = EPS

    def direction(self, gradient_P: Tensor) -> Tensor:
        """Direction of the next step with this gradient (P,), up to a factor.

        Without bias corrections, as in the authors' code: they are the same factors for all rows.
        """
        keep_first, keep_second = self.betas
        first_P = keep_first * self.first_P + (1 - keep_first) * gradient_P
        second_P = keep_second * self.second_P + (1 - keep_second) * gradient_P**2
        return first_P / (second_P + self.eps).sqrt()


class Projection:
    """Sums of values with random signs (a count sketch, Charikar et al. 2002): inner products are kept in expectation.

    That of two unit vectors has a standard deviation of at most sqrt(2 / S). Nothing is projected where P <= S.

    Args:
        values: Of a vector, P.
        sums: S, at most.
    """

    def __init__(self, values: int, sums: int, *, seed: int, device: torch.device) -> None:
        self._sums, self._exact = min(values, sums), values <= sums
        if not self._exact:
            chance = torch.Generator().manual_seed(seed)
            self._sum_P = torch.randint(self._sums, (values,), generator=chance, dtype=torch.int32).to(device)
            self._sign_P = (torch.randint(2, (values,), generator=chance, dtype=torch.int8) * 2 - 1).to(device)

    def __call__(self, vector_P: Tensor) -> Tensor:
        """The projected vector (S,)."""
        if self._exact:
            return vector_P
        return vector_P.new_zeros(self._sums).index_add_(0, self._sum_P, vector_P * self._sign_P)


def at_checkpoint(
    trainer: Trainer, checkpoint: Path, *, rows: Examples, target: Examples, parts_TG: Members, chosen: Iterable[int]
) -> Iterator[tuple[int, list[float]]]:
    """Number of each chosen row, and its influence on the loss of each part of the target, from -1 to 1.

    A part is the mean of its rows' unit gradients, so that a row with few tokens counts as much as any other.

    Args:
        trainer: A training that has ended; it is left with the values of the checkpoint.
        parts_TG: The rows of the target in each part; at least one.
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
    parts = parts_TG.shape[1]
    project = Projection(len(first_P), KEPT // parts, seed=trainer.config.seed, device=first_P.device)
    aim_GS = torch.stack([torch.zeros_like(project(first_P)) for _ in range(parts)])
    share_TG = torch.from_numpy(parts_TG / parts_TG.sum(0)).to(first_P)
    for row in range(len(target)):
        unit_S = project(_unit(gradient(target, row)))
        for part in np.flatnonzero(parts_TG[row]).tolist():
            aim_GS[part] += share_TG[row, part] * unit_S
    for row in chosen:
        yield row, (aim_GS @ project(_unit(moments.direction(gradient(rows, row))))).tolist()


def _row_gradient(trainer: Trainer) -> Callable[[Examples, int], Tensor]:
    """Gradient (P,) of the mean loss of one row, in the order of the masters."""

    def gradient(rows: Examples, row: int) -> Tensor:
        batch = rows.batch(np.array([row])).to(trainer.device)
        trainer.masters.backward(trainer.loss(batch, 1 / float(rows.supervised[row])))
        parts = []
        for master in trainer.masters:
            parts.append(torch.zeros_like(master) if master.grad is None else master.grad)
            master.grad = None
        return torch.cat([part.flatten() for part in parts])

    return gradient


def _unit(vector_P: Tensor) -> Tensor:
    return torch.nn.functional.normalize(vector_P, dim=0)
