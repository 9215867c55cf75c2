"""Whether what all rows begin with is computed once: where `batch.shared_prefix` asks for it, or where it is faster."""

from __future__ import annotations

import math

import torch

from workbench.config import TrainingSections
from workbench.config.checks.packing_checks import unsharable
from workbench.data import packing
from workbench.data.batching import Examples, Indices, global_batch, steps_per_epoch
from workbench.data.packing import RowLayout, SharedPrefix
from workbench.errors import ConfigError
from workbench.models import backbones

STEPS = 16
"""Global batches of which the tokens are counted."""
LEAST_TOKENS = 32
"""Shared tokens below which they are no prompt, but the words that a template puts before each row."""
LEAST_SAVED = {torch.float32: 0.2, torch.bfloat16: 0.2}
"""Share of the tokens that need not be computed from which it is faster on a CPU, by the type of products; never in
others. Times as fast as rows by themselves, on one core with bfloat16 units (scripts/bench/shared_prefix.py): float32
1.06 at 11 % saved, 1.18 at 23 %, 1.43 at 41 %; bfloat16 1.01 at 14 %, 1.16 at 25 %, 1.37 at 41 %."""


def arranged(
    config: TrainingSections, train: Examples, other: RowLayout, *, why: str | None, tokens: int, compute: torch.dtype
) -> RowLayout:
    """Rows with one beginning where that is asked for or faster; else `other`.

    Args:
        other: How the rows lie where nothing is shared.
        why: Reason for which rows of this backbone cannot lie in one sequence; None where they can.
        tokens: In a forward pass of `other`.
        compute: Type that matrix products run in.

    Raises:
        ConfigError: `batch.shared_prefix=true`, and it cannot be.
    """
    wanted = config.batch.shared_prefix
    if wanted is True:
        require(why)
        if not (prefix := packing.prefix_of_all(train, least=1)):
            require("the training rows have no first token in common, or one has no other")
        return SharedPrefix(prefix)
    least = LEAST_SAVED.get(compute) if backbones.device().type == "cpu" else None
    if wanted is False or why is not None or least is None or any(unsharable(config)):
        return other
    if not (prefix := packing.prefix_of_all(train, least=_worthwhile(train, least))):
        return other
    shared = SharedPrefix(prefix)
    return shared if saved(config, train.lengths, shared, other, tokens=tokens) >= least else other


def require(why: str | None) -> None:
    """Raise ConfigError where there is a reason for which nothing can be shared."""
    if why is not None:
        raise ConfigError(f"batch.shared_prefix=true: {why}. Write batch.shared_prefix=auto.")


def saved(config: TrainingSections, lengths: Indices, shared: RowLayout, other: RowLayout, *, tokens: int) -> float:
    """Share of the tokens of `other` that `shared` need not compute, in the first steps of an epoch."""
    size, auto = config.batch.size, config.batch.tokens_per_device == "auto"
    steps = [
        global_batch(step, rows=len(lengths), size=size, seed=config.seed)
        for step in range(min(STEPS, steps_per_epoch(len(lengths), size)))
    ]
    counts = [
        sum(form.tokens(lengths[cut]) for rows in steps for cut in form.cut(rows, lengths, tokens=room))
        for form, room in ((shared, shared.worth(tokens) if auto else tokens), (other, tokens))
    ]
    return 1 - counts[0] / counts[1]


def _worthwhile(train: Examples, share: float) -> int:
    """Tokens that are worth sharing, where this share of all need not be computed."""
    return max(LEAST_TOKENS, math.ceil(share * float(train.lengths.mean())))


def in_words(config: TrainingSections, train: Examples, *, why: str | None) -> list[str]:
    """Sentence on what rows have in common, where a step may compute that once.

    Args:
        why: See `arranged`.
    """
    if config.batch.shared_prefix is False or why is not None or any(unsharable(config)):
        return []
    if not (prefix := packing.prefix_of_all(train, least=_worthwhile(train, min(LEAST_SAVED.values())))):
        return []
    return [
        f"All training rows begin with the same {prefix:,} of {train.lengths.mean():,.0f} tokens: each forward pass "
        "computes them once (batch.shared_prefix)."
    ]
