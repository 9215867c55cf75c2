"""Packing: whether rows lie packed in one sequence, padded, or packed behind a shared prefix that is computed once.

`batch.packing` and `batch.shared_prefix` decide; `auto` takes what is faster, as measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel

from workbench.config import TrainingSections
from workbench.config.checks.packing_checks import unpackable, unsharable
from workbench.data import packing
from workbench.data.batching import Examples, Indices, global_batch, steps_per_epoch
from workbench.data.packing import PACKED, PADDED, RowLayout, SharedPrefix
from workbench.errors import ConfigError
from workbench.models import attention_backend, backbones
from workbench.training import capacity
from workbench.training.adapter_trainer import TrainTask
from workbench.training.signal import TrainingSignal

STEPS = 16
"""Global batches whose tokens are counted to estimate padding and savings."""
LEAST_PADDING = {torch.float32: 0.03, torch.bfloat16: 0.12}
"""Share of padding from which packing is faster, by the precision of products; never in others. Measured in tokens a
second relative to padded rows. On an H100, a 1 B model (scripts/bench/gpu.py): 1.05 at 12 % and 1.35 at 42 %. On one
core of a CPU with bfloat16 units (scripts/bench/packing.py): float32 1.11 at 8 % of padding, 1.18 at 15 %, 1.24 at
18 %; bfloat16 1.00, 1.09 and 1.17. A bank of five folds of Banking77 (scripts/bench/our_folds.py), 11 %: float32 1.08
and 1.19, bfloat16 0.97 and 1.07. Whole steps of embed and distill, with teachers or peers: float32 1.01 to 1.05 at 4 %
and 1.08 to 1.27 at 14 %, bfloat16 1.08 to 1.22 there."""
LEAST_TOKENS = 32
"""Fewest tokens of a shared prompt: shorter prefixes are what a chat template writes before each row."""
LEAST_SAVED = {torch.float32: 0.2, torch.bfloat16: 0.2}
"""Share of saved tokens from which a shared prefix is faster on a CPU, by the precision of products; never in others.
Speed relative to separate rows, on one core with bfloat16 units (scripts/bench/shared_prefix.py): float32 1.06 at 11 %
saved, 1.18 at 23 %, 1.43 at 41 %; bfloat16 1.01 at 14 %, 1.16 at 25 %, 1.37 at 41 %."""


class LaidRows(NamedTuple):
    """Rows of a training, as far as the amount of padding depends on them."""

    config: TrainingSections
    rows: int
    lengths: Callable[[Indices], Indices]
    """From the rows of a step to the tokens of each sequence: each row, or each of its texts."""
    longest: int
    """Tokens of the longest sequence."""


def arranged(
    config: TrainingSections, backbone: PreTrainedModel, signal: TrainingSignal, compute: torch.dtype, width: int
) -> RowLayout:
    """The arrangement of the rows of a training.

    Args:
        compute: Precision of matrix products.
        width: Hidden size of the backbone.

    Raises:
        ConfigError: `batch.packing=true` or `batch.shared_prefix=true`, which these rows or this backbone do not allow.
    """
    tokens = capacity.tokens_per_device(config, signal.train, backbones.device(), width=width)
    train, whole = signal.train, signal.whole
    if whole is None:
        rows = _examples(config, train.lengths)
    else:  # its loss compares rows, each of which has one or more texts
        compared, length_U = whole, whole.of(train, np.arange(1))[0].lengths

        def lengths(draws: Indices) -> Indices:
            return length_U[compared.of(train, train.sample(draws, epoch=0))[1]]

        rows = LaidRows(config, len(train), lengths, int(length_U.max()))
    why = refusal(backbone.config, longest=rows.longest, reads_packed=signal.reads_packed)
    other = _without_prefix([rows], backbone.config, why=why, tokens=tokens, compute=compute)
    return with_shared_prefix(config, signal.train, other, why=why, tokens=tokens, compute=compute)


def of_bank(
    train_tasks: Sequence[TrainTask],
    backbone: PreTrainedModel,
    *,
    reads_packed: bool,
    tokens: int,
    compute: torch.dtype,
) -> RowLayout:
    """The arrangement of the rows of a bank's members, in micro-batches of `tokens`. Raises as `arranged` does."""
    rows = [_examples(task.config, task.train.lengths) for task in train_tasks]
    why = refusal(backbone.config, longest=max(each.longest for each in rows), reads_packed=reads_packed)
    return _without_prefix(rows, backbone.config, why=why, tokens=tokens, compute=compute)


def _examples(config: TrainingSections, lengths: Indices) -> LaidRows:
    return LaidRows(config, len(lengths), lengths.__getitem__, int(lengths.max()))


def _without_prefix(
    rows: Sequence[LaidRows], backbone: PretrainedConfig, *, why: str | None, tokens: int, compute: torch.dtype
) -> RowLayout:
    """The arrangement where no prefix is shared.

    Args:
        rows: Of each training in the micro-batches.
    """
    config = rows[0].config
    wanted = config.batch.packing
    if config.distributed.pipeline > 1 and why is not None:
        raise ConfigError(f"distributed.pipeline computes packed rows, and {why}. Write distributed.pipeline=1.")
    if wanted is True or config.distributed.pipeline > 1:
        require(why)
        return PACKED
    if wanted is False or why is not None or any(any(unpackable(each.config)) for each in rows):
        return PADDED
    at_once = not config.model.dropout and attention_backend.packs_in_one_kernel(backbone, backbones.device(), compute)
    return PACKED if pays(padding(_first_steps(rows), tokens=tokens), compute=compute, at_once=at_once) else PADDED


def require(why: str | None) -> None:
    """Raise ConfigError for the reason why rows cannot be packed, if there is one."""
    if why is not None:
        raise ConfigError(f"batch.packing=true: {why}. Write batch.packing=auto.")


def refusal(backbone: PretrainedConfig, *, longest: int, reads_packed: bool) -> str | None:
    """Why rows cannot be packed for a backbone; None where they can.

    Args:
        longest: Tokens of the longest row.
        reads_packed: See `TrainingSignal`.
    """
    if not reads_packed:
        return "the loss reads padded rows"
    return attention_backend.packing_refusal(backbone, longest=longest)


def padding(steps: Sequence[Indices], *, tokens: int) -> float:
    """Share of padding among the tokens of length-sorted micro-batches of at most `tokens`.

    Args:
        steps: Tokens of each sequence, for each step.
    """
    cuts = [lengths[cut] for lengths in steps for cut in PADDED.cut(np.arange(len(lengths)), lengths, tokens=tokens)]
    return 1 - sum(int(lengths.sum()) for lengths in steps) / sum(map(PADDED.tokens, cuts))


def _first_steps(rows: Sequence[LaidRows]) -> list[Indices]:
    """Tokens of each sequence in the first steps, of uniform rows of each training."""

    def drawn(each: LaidRows, step: int) -> Indices:
        batch = each.config.batch
        return each.lengths(global_batch(step, rows=each.rows, size=batch.size, seed=each.config.seed))

    steps = min(STEPS, *(steps_per_epoch(each.rows, each.config.batch.size) for each in rows))
    return [np.concatenate([drawn(each, step) for each in rows]) for step in range(steps)]


def pays(share: float, *, compute: torch.dtype, at_once: bool) -> bool:
    """Whether packed rows are faster than padded ones with this share of padding, as far as that was measured.

    Args:
        at_once: One kernel computes the attention of all packed rows, on an accelerator.
    """
    known = at_once or attention_backend.on_cpu(backbones.device())
    return known and share >= LEAST_PADDING.get(compute, 1.0)


def with_shared_prefix(
    config: TrainingSections, train: Examples, other: RowLayout, *, why: str | None, tokens: int, compute: torch.dtype
) -> RowLayout:
    """Rows behind a shared prefix where that is asked for or faster; else `other`.

    Args:
        other: The arrangement where nothing is shared.
        why: Why rows of this backbone cannot be packed; None where they can.
        tokens: In a forward pass of `other`.
        compute: Precision of matrix products.

    Raises:
        ConfigError: `batch.shared_prefix=true`, and nothing can be shared.
    """
    wanted = config.batch.shared_prefix
    if wanted is True:
        require_shared_prefix(why)
        if not (prefix := packing.prefix_of_all(train, least=1)):
            require_shared_prefix("the training rows have no first token in common, or one has no other")
        return SharedPrefix(prefix)
    least = LEAST_SAVED.get(compute) if backbones.device().type == "cpu" else None
    staged = config.distributed.pipeline > 1
    if wanted is False or staged or why is not None or least is None or any(unsharable(config)):
        return other
    if not (prefix := packing.prefix_of_all(train, least=_worthwhile(train, least))):
        return other
    shared = SharedPrefix(prefix)
    return shared if saved(config, train.lengths, shared, other, tokens=tokens) >= least else other


def require_shared_prefix(why: str | None) -> None:
    """Raise ConfigError for the reason why nothing can be shared, if there is one."""
    if why is not None:
        raise ConfigError(f"batch.shared_prefix=true: {why}. Write batch.shared_prefix=auto.")


def saved(config: TrainingSections, lengths: Indices, shared: RowLayout, other: RowLayout, *, tokens: int) -> float:
    """Share of the tokens of `other` that `shared` saves, in the first steps of an epoch."""
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
    """Fewest shared tokens with which this share of all tokens is saved."""
    return max(LEAST_TOKENS, math.ceil(share * float(train.lengths.mean())))


def in_words(config: TrainingSections, train: Examples, *, why: str | None) -> list[str]:
    """Sentence on the prefix that all rows share, where a step may compute it once.

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
