"""Steps that stand for all of a run: one of each kind of work, by what happens in it, and how many are of this kind."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from workbench.config import TrainingSections

LOOKED_AT = 2048
"""Steps of a run whose work is looked at."""


def kinds(config: TrainingSections, *, steps: int, blocks: int) -> dict[int, float]:
    """A step (from 0) of each kind, and the share of steps that it stands for; the shares add up to 1.

    Steps differ by whether SAM, the estimate of noise and Sophia's of curvature are due, and by the share of the
    blocks' work that they do. Of the steps in which the same is due, the one with the most work and the one with the
    least stand for all, with shares that make their mean right; so the largest is among them, and what grows evenly
    with the work is exact.

    Args:
        steps: Of the run.
        blocks: Of the backbone.
    """
    optimizer = config.optimizer
    looks = optimizer.looks_every if optimizer.name == "sophia" else 1
    every = (optimizer.sam_every, optimizer.noise_scale or 1, looks)
    looked = _looked_at(steps)
    due = [tuple(step % each == 0 for each in every) for step in looked]
    work = _work(config, steps=steps, blocks=blocks)
    share_by_step: dict[int, float] = {}
    for kind in dict.fromkeys(due):
        own = [step for step, each in zip(looked, due, strict=True) if each == kind]
        of_each = np.array([work(step) for step in own])
        least, most = int(of_each.argmin()), int(of_each.argmax())
        share, spread = len(own) / len(looked), float(of_each[most] - of_each[least])
        upper = float(of_each.mean() - of_each[least]) / spread if spread else 1.0
        share_by_step[own[most]] = share * upper
        if spread:
            share_by_step[own[least]] = share * (1 - upper)
    return share_by_step


def _looked_at(steps: int) -> list[int]:
    """All steps of a run, or so many that are drawn from them; the first is there."""
    if steps <= LOOKED_AT:
        return list(range(max(1, steps)))
    drawn = np.random.default_rng(0).choice(steps, LOOKED_AT, replace=False)
    return sorted({0, *drawn.tolist()})


def _work(config: TrainingSections, *, steps: int, blocks: int) -> Callable[[int], float]:
    """Share of the blocks' work that a step does."""
    drop, tokens, grow = config.layer_drop, config.token_drop, config.grow

    def work(step: int) -> float:
        if tokens.is_on:
            return tokens.work(step / steps, blocks=blocks)
        if grow.is_on and blocks:
            return grow.depth(step, step / steps, blocks=blocks) / blocks
        if not drop.is_on or not blocks:
            return 1.0
        return 1 - float(np.mean(drop.left_out(step, step / steps, blocks=blocks, seed=config.seed)))

    return work
