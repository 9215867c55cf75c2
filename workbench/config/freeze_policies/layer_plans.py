"""The plans that several policies make."""

from __future__ import annotations

from collections.abc import Iterable

from workbench.config.freeze_config import LayerPlan


def full_rate(trains: Iterable[bool]) -> LayerPlan:
    """These layers train, each at the learning rate that is configured."""
    chosen = tuple(trains)
    return LayerPlan(chosen, (1.0,) * len(chosen))


def above(frozen: int, *, blocks: int) -> LayerPlan:
    """The first `frozen` blocks are frozen, and the embeddings before them; 0: everything trains."""
    return full_rate([not frozen, *(block > frozen for block in range(1, blocks + 1)), True])
