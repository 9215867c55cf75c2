"""Figures of a whole step: those that its losses depend on, and those that they tell."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from workbench.data.batching import Indices
from workbench.data.packing import RowLayout
from workbench.runs.ranks import Ranks
from workbench.training.distributed.row_shares import share_rows
from workbench.training.distributed.sharding import Sharded
from workbench.training.master_weights import MasterWeights
from workbench.training.row_losses import RowLossWatch
from workbench.training.signal import StepLook, TrainingSignal


class StepTraining(Protocol):
    """The training whose steps these are."""

    model: nn.Module
    signal: TrainingSignal
    arrangement: RowLayout
    masters: MasterWeights | Sharded
    device: torch.device
    ranks: Ranks
    tokens: int
    row_losses: RowLossWatch


def begin(training: StepTraining, rows: Indices) -> None:
    """Before the gradients of `rows`, of all processes; once more where they are computed again."""
    training.row_losses.begin()
    if training.signal.look is not None:
        _look(training, rows, training.signal.look)
    if training.signal.meter is not None:
        training.signal.meter.begin()


def means(training: StepTraining) -> dict[str, float]:
    """After the gradients: figures by their names in metrics.jsonl; each process has to ask."""
    meter = training.signal.meter
    return {} if meter is None else meter.means(training.ranks)


@torch.no_grad()
def _look(training: StepTraining, rows: Indices, look: StepLook) -> None:
    """Show the rows, without dropout, to what the losses of the step depend on."""
    form, ranks, masters = training.arrangement, training.ranks, training.masters
    in_step = isinstance(masters, Sharded)
    shares = share_rows(rows, look.rows.lengths, form, tokens=training.tokens, ranks=ranks, in_step=in_step)

    def read() -> list[Tensor]:
        return [look.measure(form.lay(look.rows.batch(share.rows)).to(training.device)) for share in shares]

    training.model.eval()
    measured = masters.reading(read) if isinstance(masters, Sharded) else read()
    training.model.train()
    measured = [each for share, each in zip(shares, measured, strict=True) if share.counts]
    parts = [part for part in ranks.gathered([each.tolist() for each in measured]) if part]
    sums = torch.tensor([each for part in parts for each in part], dtype=torch.float64).sum(0)
    look.take(sums.to(training.device))
