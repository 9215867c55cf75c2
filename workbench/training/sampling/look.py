"""Losses of rows among which a sampler is to choose: a forward pass without gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from workbench.config import TrainingSections
from workbench.data.batching import Examples
from workbench.data.packing import RowLayout
from workbench.runs.ranks import Ranks
from workbench.training import row_losses
from workbench.training.distributed.row_shares import RowShare
from workbench.training.distributed.sharding import Sharded
from workbench.training.master_weights import MasterWeights
from workbench.training.row_losses import RowLosses, RowLossWatch
from workbench.training.signal import Loss


class WatchedModel(Protocol):
    """The training whose model looks."""

    model: nn.Module
    config: TrainingSections
    arrangement: RowLayout
    forward: Loss
    masters: MasterWeights | Sharded
    row_losses: RowLossWatch
    device: torch.device
    ranks: Ranks


def looked_at(shares: Sequence[RowShare], training: WatchedModel, seen: Examples, epoch: int) -> RowLosses:
    """Losses of rows as the model finds them now, without dropout; of all processes, each of which has its shares.

    With the loss of each label where tokens are selected by it.
    """
    labels = training.config.data.sampling.by == "tokens"
    watch = training.row_losses

    def look() -> list[RowLosses]:
        watch.begin()
        for indices, counts in shares:
            batch = training.arrangement.batch(seen, indices, epoch=epoch).to(training.device)
            with torch.no_grad(), watch.of(indices if counts else indices[:0], batch):
                training.forward(batch, 1.0)
        return training.ranks.gathered(watch.collected(labels=labels))

    training.model.eval()
    rank_losses = training.masters.reading(look) if isinstance(training.masters, Sharded) else look()
    training.model.train()
    return row_losses.joined(rank_losses)
