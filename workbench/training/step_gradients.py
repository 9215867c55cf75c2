"""Gradients of whole steps, where they are no sum over micro-batches that one process computes by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workbench.data.batching import Examples, Indices, MicroBatch
from workbench.data.packing import RowLayout
from workbench.runs.ranks import Ranks
from workbench.training.distributed import pipeline_schedule as schedule
from workbench.training.distributed.pipeline import Pipelined
from workbench.training.distributed.pipeline_schedule import StageExchange, StagePass
from workbench.training.distributed.row_shares import share_rows
from workbench.training.distributed.sharding import Sharded
from workbench.training.gradient_accumulation import CachedGradients, Noise
from workbench.training.master_weights import MasterWeights
from workbench.training.row_losses import RowLossWatch
from workbench.training.signal import GlobalLoss


@dataclass
class PipelineSteps:
    """Adds up the gradients of a global batch, whose micro-batches go through the stages one after another."""

    masters: Pipelined
    arrangement: RowLayout
    """How the rows of a micro-batch are laid out."""
    noise: Noise
    device: torch.device
    epoch: Callable[[], int]
    """The pass over the data that the present step belongs to."""
    watch: RowLossWatch
    """Hears the losses of rows in the last stage."""
    live: dict[int, tuple[Tensor | None, Tensor]] = field(default_factory=dict)
    """Input and output of each micro-batch that is between its two passes."""

    def add(self, seen: Examples, rows: Indices, *, step: int, tokens: int) -> Tensor:
        """Add the gradients of this stage for this pipeline's share of the rows; returns the share of the loss.

        The loss is 0 in all stages but the last.

        Args:
            tokens: In a micro-batch, padding included if there is any.
        """
        shares = share_rows(
            rows, seen.lengths, self.arrangement, tokens=tokens, ranks=self.masters.pipelines, in_step=False
        )
        parts, line = [share.rows for share in shares], self.masters.stage.line
        order = schedule.one_forward_one_backward(line.stage, stages=line.stages, batches=len(parts))
        exchanges = schedule.exchanges(order, line.stage, stages=line.stages)
        supervised = seen.supervised[rows].sum().item()
        batches: dict[int, MicroBatch] = {}
        result: Tensor | None = None
        loss = torch.zeros((), device=self.device)
        for upcoming, exchange in zip([*order, None], exchanges, strict=True):
            if upcoming is not None and not upcoming.backward:
                part = parts[upcoming.batch]
                batches[upcoming.batch] = self.arrangement.batch(seen, part, epoch=self.epoch()).to(self.device)
            received = self._exchange(exchange, result, batches)
            if upcoming is None:
                break
            batch, part = batches[upcoming.batch], parts[upcoming.batch]
            counted = part if line.last and not upcoming.backward else part[:0]
            with self.noise(batch, part, seen, step=step), self.watch.of(counted, batch):
                result = self._pass(upcoming, batch, received, scale=1 / supervised)
            if upcoming.backward:
                del batches[upcoming.batch]
            elif line.last:
                loss += self.live[upcoming.batch][1].detach()
        self.masters.add_up()
        return loss

    def _exchange(
        self, exchange: StageExchange, result: Tensor | None, batches: Mapping[int, MicroBatch]
    ) -> Tensor | None:
        """Send the result of the last pass, and receive what the next one needs, as far as there are such."""
        sent, received, line = exchange.sent, exchange.received, self.masters.stage.line
        assert sent is None or result is not None
        room = None
        if sent is not None and sent.target > line.stage:
            assert result is not None
            line.tell(result)
        if received is not None and received.source < line.stage:
            shape = batches[received.batch].inputs["input_ids"].shape
            room = line.room(*shape, self.masters.stage.width)
        elif received is not None:
            room = torch.empty_like(self.live[received.batch][1])
        target, source = sent.target if sent else line.stage, received.source if received else line.stage
        return line.swap(result if sent else None, target, room, source)

    def _pass(self, now: StagePass, batch: MicroBatch, received: Tensor | None, *, scale: float) -> Tensor | None:
        """Compute a pass; returns what a neighbour is sent of it."""
        if not now.backward:
            given = None if received is None else received.requires_grad_()
            output = self.masters.loss(batch, scale, given)
            self.live[now.batch] = given, output
            return output.detach()
        given, output = self.live.pop(now.batch)
        if output.requires_grad:  # in the first stage there may be nothing that trains
            output.backward(received)
        return None if given is None else given.grad


def of_whole_steps(
    compared: GlobalLoss | None,
    masters: MasterWeights | Sharded,
    arrangement: RowLayout,
    noise: Noise,
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
    return None if compared is None else CachedGradients(compared, arrangement, masters.backward, noise, ranks, device)
