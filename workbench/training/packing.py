"""Whether the rows of a training are packed: where `batch.packing` asks for it, or where it is faster."""

from __future__ import annotations

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel

from workbench.config import TrainingSections
from workbench.config.packing_checks import unpackable
from workbench.data.arrangement import PACKED, PADDED, Arrangement
from workbench.data.batching import Indices, global_batch, steps_per_epoch
from workbench.errors import ConfigError
from workbench.models import backbones, packed_attention
from workbench.training import capacity, prefix_sharing
from workbench.training.signal import TrainingSignal

STEPS = 16
"""Global batches of which the padding is counted."""


def arranged(
    config: TrainingSections, backbone: PreTrainedModel, signal: TrainingSignal, compute: torch.dtype, width: int
) -> Arrangement:
    """How the rows of a training are laid out.

    Args:
        compute: Type that matrix products run in.
        width: Hidden size of the backbone.

    Raises:
        ConfigError: `batch.packing=true` or `batch.shared_prefix=true`, and the rows cannot lie so.
    """
    tokens = capacity.tokens_per_device(config, signal.train, backbones.device(), width=width)
    why = refusal(backbone.config, longest=int(signal.train.lengths.max()), reads_packed=signal.reads_packed)
    other = _apart(config, signal.train.lengths, why=why, tokens=tokens, compute=compute)
    return prefix_sharing.arranged(config, signal.train, other, why=why, tokens=tokens, compute=compute)


def _apart(
    config: TrainingSections, lengths: Indices, *, why: str | None, tokens: int, compute: torch.dtype
) -> Arrangement:
    """How rows are laid out that share nothing."""
    wanted = config.batch.packing
    if wanted is True:
        require(why)
        return PACKED
    if wanted is False or why is not None or any(unpackable(config)):
        return PADDED
    share = padding(lengths, batch=config.batch.size, tokens=tokens, seed=config.seed)
    return PACKED if pays(share, compute=compute) else PADDED


def require(why: str | None) -> None:
    """Raise ConfigError where there is a reason for which rows cannot be packed."""
    if why is not None:
        raise ConfigError(f"batch.packing=true: {why}. Write batch.packing=auto.")


def refusal(backbone: PretrainedConfig, *, longest: int, reads_packed: bool) -> str | None:
    """Why rows cannot be packed for a backbone; None where they can.

    Args:
        longest: Tokens of the longest row.
        reads_packed: See `TrainingSignal`; not where a teacher is read, which `batch.packing=true` does not come to.
    """
    if not reads_packed:
        return "the loss reads padded rows"
    return packed_attention.refusal(backbone, longest=longest)


def padding(lengths: Indices, *, batch: int, tokens: int, seed: int) -> float:
    """Share of padding in what length-sorted micro-batches compute, in the first steps of an epoch.

    Args:
        lengths: Tokens of every example.
        batch: Examples of a step.
        tokens: In a micro-batch.
    """
    steps = min(STEPS, steps_per_epoch(len(lengths), batch))
    rows = [global_batch(step, rows=len(lengths), size=batch, seed=seed) for step in range(steps)]
    cuts = [lengths[cut] for each in rows for cut in PADDED.cut(each, lengths, tokens=tokens)]
    return 1 - int(lengths[np.concatenate(rows)].sum()) / sum(map(PADDED.tokens, cuts))


def pays(share: float, *, compute: torch.dtype) -> bool:
    """Whether packed rows are known to take less time than padded ones with this share of padding."""
    return backbones.device().type == "cpu" and share >= LEAST_PADDING.get(compute, 1.0)


LEAST_PADDING = {torch.float32: 0.03, torch.bfloat16: 0.1}
"""Share of padding from which packing is faster on a CPU, by the type of products; never in others. On one core with
bfloat16 units, tokens a second against padded rows (scripts/bench/packing.py): float32 1.11 at 8 % of padding, 1.18 at
15 %, 1.24 at 18 %; bfloat16 1.00, 1.09 and 1.17."""
