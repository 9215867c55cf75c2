"""Which kernels an average step of a run calls, in their order: found out on tensors without numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from workbench.data.batching import Indices, global_batch, micro_batches, steps_per_epoch
from workbench.losses.next_token import POSITIONS
from workbench.planning.compiled import Size, new_shares
from workbench.planning.kernels import Kernel, Kernels
from workbench.training.trainer import Trainer

STRATA = 4
"""Kinds of micro-batches, from small to large, of each of which one is looked at."""
BLOCKS = 48
"""Blocks of a model to look at in all: the deeper it is, the fewer kinds, as each takes time and is more like the rest.
"""
STEPS = 500
"""Steps of which the micro-batches are known; those after them are alike."""


@dataclass(frozen=True)
class Part:
    """A micro-batch that stands for others."""

    calls: Sequence[Kernel]
    share: float
    """How many like it a step has on average."""
    new: Mapping[Kernel, float]
    """Of each product, how often its shape did not come shortly before, so that it is made ready: as a share."""
    collate: Callable[[], object]
    """Makes its tensors of its rows."""


@dataclass(frozen=True)
class StepWork:
    """What an average step computes."""

    parts: Sequence[Part]
    update: Sequence[Kernel]
    """Calls of clipping and of the optimizer."""
    recomputes: bool
    """Whether activations are computed again in the backward pass."""


def record(fit: Trainer) -> StepWork:
    """What an average step of `fit` computes, where tensors are imagined; `fit` is prepared and was rehearsed."""
    fit.model.train()  # it was evaluated last
    cut = _micro_batches(fit)
    steps, every = len(cut), list(chain.from_iterable(cut))
    weights = np.array([_weight(fit, rows) for rows in every])
    moments = (0.0,) if fit.config.freeze.fixed else (0.0, 0.999)
    passes = 1 + (1 / fit.config.optimizer.sam_every if fit.config.optimizer.sam is not None else 0)
    looked_at = []
    for share in moments:
        fit.freezer.follow(step=0, share=share)
        for members in strata(weights, max(1, min(STRATA, BLOCKS // len(fit.freezer.blocks)))):
            chosen = members[np.abs(weights[members] - weights[members].mean()).argmin()]
            rows = every[chosen]
            with Kernels() as kernels:
                fit.backward(rows)
            count = float(passes * weights[members].sum() / weights[chosen] / steps / len(moments))
            looked_at.append((rows, kernels.calls, count))
    sizes = [Size(len(rows), _tokens(fit, rows)) for rows in every]
    new = new_shares(sizes, [(len(rows), calls) for rows, calls, _ in looked_at])
    parts = [
        Part(calls, count, shares, collate=lambda rows=rows: fit.train.batch(rows, epoch=0))  # type: ignore[misc]
        for (rows, calls, count), shares in zip(looked_at, new, strict=True)
    ]
    with Kernels() as update:
        fit.member.update(1.0, every[0])
        fit.masters.refresh()
    return StepWork(parts, update.calls, recomputes=fit.config.train.checkpointing is True)


def _micro_batches(fit: Trainer) -> list[list[Indices]]:
    """Those of each step, from the first on."""
    train, size = fit.train, fit.config.batch.size
    per_epoch = steps_per_epoch(len(train), size)
    found = []
    for step in range(min(STEPS, fit.member.total)):
        draws = global_batch(step, rows=len(train), size=size, seed=fit.config.seed)
        rows = train.drawn(draws, epoch=step // per_epoch)
        found.append(list(micro_batches(rows, train.lengths, tokens=fit.tokens)))
    return found


def _tokens(fit: Trainer, rows: Indices) -> int:
    """With padding."""
    return len(rows) * int(fit.train.lengths[rows].max())


def _weight(fit: Trainer, rows: Indices) -> float:
    """Multiplications of a usual transformer, by its width: each layer's matrices hold 12 width^2 numbers."""
    longest, backbone = float(fit.train.lengths[rows].max()), fit.freezer.backbone
    layers = len(fit.freezer.blocks) * _tokens(fit, rows) * (12 * fit.width + 2 * longest)
    words: int = backbone.config.get_text_config().vocab_size if backbone.get_output_embeddings() is not None else 0
    return layers + words * POSITIONS * math.ceil(float(fit.train.supervised[rows].sum()) / POSITIONS)


def strata(weights: Any, count: int) -> list[Any]:
    """Numbers of micro-batches in groups of about the same total weight, from small to large."""
    order = np.argsort(weights, kind="stable")
    before = np.cumsum(weights[order]) - weights[order] / 2
    group = np.minimum(before / weights.sum() * count, count - 1).astype(int)
    return [order[group == number] for number in np.unique(group)]
