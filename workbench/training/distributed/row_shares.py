"""Rows of a global batch, or of a set, dealt to processes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from workbench.data.batching import Indices
from workbench.data.packing import RowLayout
from workbench.runs.ranks import Ranks


class RowShare(NamedTuple):
    """Rows of one forward pass."""

    rows: Indices
    counts: bool = True
    """Whether they carry loss; others keep a process in step with those that have one more."""


def own_rows(lengths: Indices, ranks: Ranks) -> Indices:
    """Rows of a set that this process reads: each process gets as many, give or take one, and as long ones.

    Args:
        lengths: Tokens of every row.
    """
    own: Indices = np.sort(np.argsort(lengths, kind="stable")[ranks.rank :: ranks.world])
    return own


def share_rows(
    rows: Indices, lengths: Indices, arrangement: RowLayout, *, tokens: int, ranks: Ranks, in_step: bool
) -> list[RowShare]:
    """The micro-batches of a global batch that this process computes; all processes cut it alike.

    Args:
        lengths: Tokens of every example.
        arrangement: How the rows of a micro-batch are laid out.
        tokens: In a micro-batch at most.
        in_step: All processes must do the same number of forward passes.
    """
    parts = list(arrangement.cut(rows, lengths, tokens=tokens))
    while len(parts) % ranks.world and max(map(len, parts)) > 1:
        # Everybody gets as many where that is possible: the one with most tokens is the one to halve.
        widest = max((part for part in parts if len(part) > 1), key=lambda part: arrangement.tokens(lengths[part]))
        place = next(number for number, part in enumerate(parts) if part is widest)
        half = (len(widest) + 1) // 2
        parts[place : place + 1] = [widest[:half], widest[half:]]
    own = [RowShare(part) for part in parts[ranks.rank :: ranks.world]]
    missing = -(-len(parts) // ranks.world) - len(own) if in_step else 0
    return [*own, *(RowShare(parts[-1][-1:], counts=False) for _ in range(missing))]
