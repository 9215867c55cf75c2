"""Whether the rows of a training are packed: where `batch.packing` asks for it, or where it is faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel

from workbench.config import TrainingSections
from workbench.config.checks.packing_checks import unpackable
from workbench.data.batching import Indices, global_batch, steps_per_epoch
from workbench.data.packing import PACKED, PADDED, RowLayout
from workbench.errors import ConfigError
from workbench.models import backbones, packed_attention
from workbench.training import capacity, prefix_sharing
from workbench.training.adapter_trainer import TrainTask
from workbench.training.signal import TrainingSignal

STEPS = 16
"""Global batches of which the padding is counted."""


class LaidRows(NamedTuple):
    """Rows of a training, as far as it depends on them how much padding there would be."""

    config: TrainingSections
    rows: int
    lengths: Callable[[Indices], Indices]
    """From the rows of a step to the tokens of what is laid out for them: each row, or each of the texts of theirs."""
    longest: int
    """Tokens of the longest of all."""


def arranged(
    config: TrainingSections, backbone: PreTrainedModel, signal: TrainingSignal, compute: torch.dtype, width: int
) -> RowLayout:
    """How the rows of a training are laid out.

    Args:
        compute: Type that matrix products run in.
        width: Hidden size of the backbone.

    Raises:
        ConfigError: `batch.packing=true` or `batch.shared_prefix=true`, and the rows cannot lie so.
    """
    tokens = capacity.tokens_per_device(config, signal.train, backbones.device(), width=width)
    rows = _laid(config, signal)
    why = refusal(backbone.config, longest=rows.longest, reads_packed=signal.reads_packed)
    other = _apart([rows], backbone.config, why=why, tokens=tokens, compute=compute)
    return prefix_sharing.arranged(config, signal.train, other, why=why, tokens=tokens, compute=compute)


def of_bank(
    train_tasks: Sequence[TrainTask],
    backbone: PreTrainedModel,
    *,
    reads_packed: bool,
    tokens: int,
    compute: torch.dtype,
) -> RowLayout:
    """How the rows of a bank's members are laid out, in micro-batches of so many tokens. Raises as `arranged` does."""
    rows = [_examples(task.config, task.train.lengths) for task in train_tasks]
    why = refusal(backbone.config, longest=max(each.longest for each in rows), reads_packed=reads_packed)
    return _apart(rows, backbone.config, why=why, tokens=tokens, compute=compute)


def _laid(config: TrainingSections, signal: TrainingSignal) -> LaidRows:
    """The rows of a training; where its loss compares rows, the units that they consist of."""
    train, whole = signal.train, signal.whole
    if whole is None:
        return _examples(config, train.lengths)
    length_U = whole.of(train, np.arange(1))[0].lengths

    def lengths(draws: Indices) -> Indices:
        return length_U[whole.of(train, train.sample(draws, epoch=0))[1]]

    return LaidRows(config, len(train), lengths, int(length_U.max()))


def _examples(config: TrainingSections, lengths: Indices) -> LaidRows:
    return LaidRows(config, len(lengths), lengths.__getitem__, int(lengths.max()))


def _apart(
    rows: Sequence[LaidRows], backbone: PretrainedConfig, *, why: str | None, tokens: int, compute: torch.dtype
) -> RowLayout:
    """How rows are laid out that share nothing.

    Args:
        rows: Those of each training in the micro-batches.
    """
    config = rows[0].config
    wanted = config.batch.packing
    if wanted is True:
        require(why)
        return PACKED
    if wanted is False or why is not None or any(any(unpackable(each.config)) for each in rows):
        return PADDED
    at_once = not config.model.dropout and packed_attention.at_once(backbone, backbones.device(), compute)
    return PACKED if pays(padding(_first_steps(rows), tokens=tokens), compute=compute, at_once=at_once) else PADDED


def require(why: str | None) -> None:
    """Raise ConfigError where there is a reason for which rows cannot be packed."""
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
    return packed_attention.refusal(backbone, longest=longest)


def padding(steps: Sequence[Indices], *, tokens: int) -> float:
    """Share of padding in what length-sorted micro-batches of so many tokens compute.

    Args:
        steps: Tokens of the examples of each step.
    """
    cuts = [lengths[cut] for lengths in steps for cut in PADDED.cut(np.arange(len(lengths)), lengths, tokens=tokens)]
    return 1 - sum(int(lengths.sum()) for lengths in steps) / sum(map(PADDED.tokens, cuts))


def _first_steps(rows: Sequence[LaidRows]) -> list[Indices]:
    """Tokens of what is laid out in the first steps, evenly drawn by each training."""

    def drawn(each: LaidRows, step: int) -> Indices:
        batch = each.config.batch
        return each.lengths(global_batch(step, rows=each.rows, size=batch.size, seed=each.config.seed))

    steps = min(STEPS, *(steps_per_epoch(each.rows, each.config.batch.size) for each in rows))
    return [np.concatenate([drawn(each, step) for each in rows]) for step in range(steps)]


def pays(share: float, *, compute: torch.dtype, at_once: bool) -> bool:
    """Whether packed rows are known to take less time than padded ones with this share of padding.

    Args:
        at_once: One kernel computes the attention of all packed rows, on an accelerator.
    """
    known = at_once or backbones.device().type == "cpu"
    return known and share >= LEAST_PADDING.get(compute, 1.0)


LEAST_PADDING = {torch.float32: 0.03, torch.bfloat16: 0.12}
"""Share of padding from which packing is faster, by the type of products; never in others. On an H100, tokens a second
of a 1 B model against padded rows (scripts/bench/gpu.py): 1.05 at 12 % and 1.35 at 42 %. On one core of a CPU with
bfloat16 units, tokens a second against padded rows (scripts/bench/packing.py): float32 1.11 at 8 % of padding, 1.18 at
15 %, 1.24 at 18 %; bfloat16 1.00, 1.09 and 1.17. A bank of five folds of Banking77 (scripts/bench/our_folds.py), 11 %:
float32 1.08 and 1.19, bfloat16 0.97 and 1.07. Whole steps of embed and distill, with teachers or peers: float32 1.01 to
1.05 at 4 % and 1.08 to 1.27 at 14 %, bfloat16 1.08 to 1.22 there."""
