"""Gradients of whole steps, where they are no sum over micro-batches that one process computes by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from workbench.data.batching import Examples, Indices
from workbench.data.packing import RowLayout
from workbench.runs.ranks import Ranks
from workbench.training.distributed import pipeline
from workbench.training.distributed.data_parallel import RowShare, share_rows
from workbench.training.distributed.pipeline import Pipelined
from workbench.training.distributed.sharding import Sharded
from workbench.training.gradient_accumulation import CachedGradients, Noise
from workbench.training.master_weights import MasterWeights
from workbench.training.row_losses import RowLossWatch
from workbench.training.signal import GlobalLoss


class _Filled(NamedTuple):
    """The rows of a training, and one of padding."""

    lengths: Indices


@dataclass
class PipelineSteps:
    """Adds up the gradients of a global batch, whose micro-batches go through the stages of a pipeline."""

    masters: Pipelined
    arrangement: RowLayout
    """How the rows of a micro-batch are laid out: packed."""
    noise: Noise
    device: torch.device
    epoch: Callable[[], int]
    """The pass over the data that the present step belongs to."""
    watch: RowLossWatch
    """Hears the losses of rows in the last stage."""

    def add(self, seen: Examples, rows: Indices, *, step: int, tokens: int) -> Tensor:
        """Add the gradients of this process for this pipeline's shard of the rows; returns its part of the loss.

        The loss is 0 where no head is.

        Args:
            tokens: In a micro-batch, which is filled up to as many.
        """
        shares = share_rows(
            rows, seen.lengths, self.arrangement, tokens=tokens, ranks=self.masters.pipelines, in_step=True
        )
        shares += [RowShare(shares[-1].rows[-1:], counts=False)] * (
            self.masters.line.micro_batches(len(shares)) - len(shares)
        )
        tokens = max(tokens, *(int(seen.lengths[share.rows].sum()) for share in shares))
        laid = [self.arrangement.batch(seen, share.rows, epoch=self.epoch()) for share in shares]
        batches = [pipeline.of_one_length(batch, tokens).to(self.device) for batch in laid]
        supervised = seen.supervised[rows].sum().item()

        @contextmanager
        def around(number: int, heard: bool) -> Iterator[None]:
            share, more = shares[number], tokens - int(seen.lengths[shares[number].rows].sum())
            filled: Any = _Filled(np.append(seen.lengths, more))
            drawn = np.append(share.rows, len(seen.lengths)) if more else share.rows
            listening = self.watch.of(share.rows if heard and share.counts else share.rows[:0], batches[number])
            with self.noise(batches[number], drawn, filled, step=step), listening:
                yield

        scales = [share.counts / supervised for share in shares]
        return self.masters.add(pipeline.StepBatches(batches, scales, around)).to(self.device)


def of_whole_steps(
    compared: GlobalLoss | None,
    masters: MasterWeights | Sharded,
    arrangement: RowLayout,
    noise: Noise,
    groups: Ranks,
    ranks: Ranks,
    device: torch.device,
    *,
    epoch: Callable[[], int],
    watch: RowLossWatch,
) -> CachedGradients | PipelineSteps | None:
    """An adder of the gradients of a step; None where the trainer adds them up micro-batch by micro-batch.

    Args:
        compared: A loss that compares all rows of a step.
        epoch: The pass over the data that the present step belongs to.
        watch: Hears the losses of rows.
    """
    if isinstance(masters, Pipelined):
        return PipelineSteps(masters, arrangement, noise, device, epoch, watch)
    if compared is None:
        return None
    return CachedGradients(compared, arrangement, masters.backward, noise, groups, ranks, device)
