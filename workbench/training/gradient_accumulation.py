"""Gradient accumulation: the gradients of a global batch, added up over micro-batches of any size and over processes.

A loss that is a sum over rows is computed micro-batch by micro-batch. A loss that compares all rows of the global batch
goes through GradCache (Gao et al. 2021, arXiv:2101.06983, section 3): the outputs of all units (texts) are computed
without a graph, then the loss and its gradient with respect to the outputs, then each micro-batch again with a graph,
into which that gradient flows. So the loss sees the whole batch, and memory holds the graph of one micro-batch. Dropout
is a function of seed, step and unit, so that both passes compute the same. The last micro-batch keeps its first graph;
where it is the only one, there is a single pass.

Legend: N units of a global batch, U of a micro-batch, D numbers of an output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from workbench.data import packing
from workbench.data.batching import Examples, Indices, MicroBatch
from workbench.data.packing import RowLayout
from workbench.data.prefetch import Prefetcher
from workbench.runs.ranks import Ranks
from workbench.training import row_losses
from workbench.training.adapter_trainer import AdapterTrainer
from workbench.training.distributed.data_parallel import RowShare, share_rows
from workbench.training.distributed.pipeline import Pipelined
from workbench.training.distributed.sharding import Sharded
from workbench.training.master_weights import MasterWeights
from workbench.training.optim import noise_scale
from workbench.training.optim.noise_scale import GradientParts
from workbench.training.row_losses import RowLosses, RowLossWatch
from workbench.training.sampling.sampler import Draw
from workbench.training.signal import BatchLoss, GlobalLoss, Loss, StepLook, Units

T = TypeVar("T")


class Noise(Protocol):
    """Dropout and other noise, a function of seed, step and unit."""

    def __call__(self, batch: MicroBatch, indices: Indices, seen: Units, *, step: int) -> AbstractContextManager[None]:
        """Around the forward and the backward pass of a micro-batch of the units `indices`."""


@dataclass
class GradientAccumulation:
    """Adds up the gradients of a global batch over its micro-batches, for a loss that is a sum over rows."""

    model: nn.Module
    forward: Loss
    masters: MasterWeights | Sharded
    arrangement: RowLayout
    """How the rows of a micro-batch are laid out."""
    groups: Ranks
    """The groups of processes that deal the rows of a step among them."""
    ranks: Ranks
    device: torch.device
    noise: Noise
    row_losses: RowLossWatch
    member: AdapterTrainer
    known: bool
    """Whether the rows of the next step are known before this one ends."""
    tokens: int = 0
    """Tokens in one forward pass, padding included if there is any."""
    drawn: Draw = field(default_factory=lambda: Draw(np.arange(0)))
    """Rows and weights of the present step, where a sampler chose them."""
    ahead: Prefetcher[MicroBatch] | None = None
    """Collates the next micro-batch in a thread; None: no thread."""

    def add(self, rows: Indices, parts: GradientParts | None = None, *, step: int) -> Tensor:
        """Add the gradients of this process's share of the rows; returns its share of their mean loss.

        Args:
            parts: Receives the gradients of parts of the batch, to estimate their noise.
            step: From 0.
        """
        if isinstance(self.masters, Pipelined):
            return self._add_in_stages(self.masters, rows, step=step)
        seen, supervised = self.member.seen, self.member.seen.supervised[rows].sum().item()
        factor = self.masters.counted if isinstance(self.masters, Sharded) else 1
        loss = torch.zeros((), device=self.device)
        for part_rows in [rows] if parts is None else noise_scale.cut(rows):
            shares = self._shares(part_rows, seen.lengths)
            for number, (indices, counts) in enumerate(shares):
                then = shares[number + 1].rows if number + 1 < len(shares) else None
                batch = self.drawn.weighed(self._batch(seen, indices, then=then), indices)
                counted = indices if counts else indices[:0]
                with self.noise(batch, indices, seen, step=step), self.row_losses.of(counted, batch):
                    part = self.forward(batch, counts / supervised)
                    self.masters.backward(part)
                loss += part.detach() / factor
                del part  # bitsandbytes' 8-bit layers hold their inputs for as long as the graph lives
            if parts is not None:
                parts.add(len(part_rows), share=seen.supervised[part_rows].sum().item() / supervised)
        return loss

    def _add_in_stages(self, masters: Pipelined, rows: Indices, *, step: int) -> Tensor:
        """`add` where each process holds some blocks, through which micro-batches of one length go in turn."""
        seen, supervised = self.member.seen, self.member.seen.supervised[rows].sum().item()
        shares = self._shares(rows, seen.lengths)
        filling = masters.stages.micro_batches(len(shares)) - len(shares)
        shares += [RowShare(shares[-1].rows[-1:], counts=False)] * filling
        tokens = max(self.tokens, *(int(seen.lengths[share.rows].sum()) for share in shares))

        laid = [self.arrangement.batch(seen, share.rows, epoch=self.member.epoch) for share in shares]
        batches = [packing.filled(each, tokens).to(self.device) for each in laid]

        @contextmanager
        def passing(number: int, heard: bool) -> Iterator[tuple[MicroBatch, float]]:
            share, batch = shares[number], batches[number]
            counted = share.rows if heard and share.counts else share.rows[:0]
            with self.noise(batch, share.rows, seen, step=step), self.row_losses.of(counted, batch):
                yield batch, share.counts / supervised

        return masters.add(len(shares), tokens, passing).to(self.device)

    @torch.no_grad()
    def losses_now(self, rows: Indices, *, labels: bool) -> RowLosses:
        """Losses of rows, computed without dropout and gradients, of all processes; a sampler chooses among them.

        Args:
            labels: Whether to include the loss of each label.
        """
        seen, epoch = self.member.seen, self.member.epoch

        def read() -> list[RowLosses]:
            self.row_losses.begin()
            for indices, counts in self._shares(rows, seen.lengths):
                batch = self.arrangement.batch(seen, indices, epoch=epoch).to(self.device)
                with self.row_losses.of(indices if counts else indices[:0], batch):
                    self.forward(batch, 1.0)
            return self.ranks.gathered(self.row_losses.collected(labels=labels))

        return row_losses.joined(self._evaluated(read))

    @torch.no_grad()
    def look(self, rows: Indices, look: StepLook) -> None:
        """Let a loss measure what it depends on over all rows of the step, without dropout and gradients."""
        lengths, in_step = look.rows.lengths, isinstance(self.masters, Sharded)
        shares = share_rows(rows, lengths, self.arrangement, tokens=self.tokens, ranks=self.groups, in_step=in_step)

        def read() -> list[Tensor]:
            return [look.measure(self.arrangement.lay(look.rows.batch(each.rows)).to(self.device)) for each in shares]

        measured = [each for share, each in zip(shares, self._evaluated(read), strict=True) if share.counts]
        by_rank = self.ranks.gathered([each.tolist() for each in measured])
        parts = [part for part in by_rank[:: self.ranks.world // self.groups.world] if part]
        sums = torch.tensor([each for part in parts for each in part], dtype=torch.float64).sum(0)
        look.take(sums.to(self.device))

    def _evaluated(self, read: Callable[[], T]) -> T:
        """Result of `read`, with the model in evaluation mode."""
        self.model.eval()
        found = self.masters.reading(read) if isinstance(self.masters, Sharded) else read()
        self.model.train()
        return found

    def _shares(self, rows: Indices, lengths: Indices) -> list[RowShare]:
        in_step = isinstance(self.masters, Sharded)
        return share_rows(rows, lengths, self.arrangement, tokens=self.tokens, ranks=self.groups, in_step=in_step)

    def _batch(self, seen: Examples, rows: Indices, *, then: Indices | None) -> MicroBatch:
        """A micro-batch on the device; a thread collates the following one: `then`, or the next step's first."""
        epoch, collated = self.member.epoch, self.arrangement.batch
        if self.ahead is None:
            return collated(seen, rows, epoch=epoch).to(self.device)
        batch = self.ahead.get((id(seen), epoch, rows.tobytes()), partial(collated, seen, rows, epoch=epoch))
        if then is None and self.known:
            seen, (upcoming, epoch) = self.member.seen_after(), self.member.batch_after()
            # None where other processes have all rows of it.
            then = next((share.rows for share in self._shares(upcoming, seen.lengths)), None)
        if then is not None:
            self.ahead.expect((id(seen), epoch, then.tobytes()), partial(collated, seen, then, epoch=epoch))
        return batch.to(self.device)


@dataclass
class Pull:
    """What a micro-batch of units adds to the loss of its global batch, as a scalar with the gradient of that."""

    loss: GlobalLoss
    gradient_UD: Tensor | None = None
    """Of the loss by the outputs; None before they are known: their sum is taken, to measure memory."""

    def __call__(self, batch: MicroBatch, scale: float) -> Tensor:
        """The scalar times a factor."""
        return self.of(self.loss.outputs(batch)) * scale

    def of(self, outputs_UD: Tensor) -> Tensor:
        """The same of outputs that are known."""
        return (outputs_UD if self.gradient_UD is None else outputs_UD * self.gradient_UD).sum()


@dataclass(frozen=True)
class CachedGradients:
    """Adds up the gradients of a global batch, for a loss that compares its rows."""

    pull: Pull
    forward: Loss
    """`pull`, through the engine of `masters`."""
    masters: MasterWeights | Sharded
    arrangement: RowLayout
    """How the units of a micro-batch are laid out."""
    noise: Noise
    groups: Ranks
    """The groups of processes that deal the units of a step among them."""
    ranks: Ranks
    device: torch.device

    def add(self, seen: Examples, rows: Indices, *, step: int, tokens: int) -> Tensor:
        """Add the gradients of this process's share of the units; returns its share of the loss.

        All processes compute the whole loss, of which only the first one's counts.

        Args:
            tokens: In a micro-batch, padding included if there is any.
        """
        whole = BatchLoss(*self.pull.loss.of(seen, rows))
        lengths, engine = whole.units.lengths, isinstance(self.masters, Sharded)
        shares = share_rows(whole.numbers, lengths, self.arrangement, tokens=tokens, ranks=self.groups, in_step=engine)
        places = [torch.from_numpy(np.searchsorted(whole.numbers, each.rows)).to(self.device) for each in shares]
        outputs_ND, kept = self._outputs(whole, shares, places, step)
        loss = torch.zeros((), device=self.device)
        for term in whole.terms():
            value = term(outputs_ND)
            value.backward()
            loss += value.detach()
        assert outputs_ND.grad is not None
        for share, place_U in reversed(list(zip(shares, places, strict=True))):
            batch = self._batch(whole.units, share.rows)
            with self.noise(batch, share.rows, whole.units, step=step):
                self.pull.gradient_UD = outputs_ND.grad[place_U]
                if kept is None:
                    self.masters.backward(self.forward(batch, float(share.counts)))
                else:
                    self.masters.backward(self.pull.of(kept))
            kept = None  # memory holds one graph
        self.pull.gradient_UD = None
        return loss if self.ranks.first else torch.zeros_like(loss)

    def _outputs(
        self, whole: BatchLoss, shares: list[RowShare], places: list[Tensor], step: int
    ) -> tuple[Tensor, Tensor | None]:
        """Outputs (N, D) of all units, and those (U, D) of the last micro-batch with their graph.

        None of those where an engine follows each pass from its loss.
        """
        engine = self.masters if isinstance(self.masters, Sharded) else None

        def compute() -> list[Tensor]:
            computed = []
            for number, share in enumerate(shares):
                batch, last = self._batch(whole.units, share.rows), number == len(shares) - 1
                graph = torch.set_grad_enabled(last and engine is None)
                with self.noise(batch, share.rows, whole.units, step=step), graph:
                    computed.append(self.pull.loss.outputs(batch))
            return computed

        computed = compute() if engine is None else engine.reading(compute)
        width = max(self.ranks.gathered(computed[-1].shape[1] if computed else 0))
        outputs_ND = torch.zeros(len(whole.numbers), width, device=self.device)
        first = self.ranks.rank % (self.ranks.world // self.groups.world) == 0  # the others of a group have the same
        for share, place_U, own_UD in zip(shares, places, computed, strict=True) if first else ():
            if share.counts:
                outputs_ND[place_U] = own_UD.detach()
        self.ranks.add_up([outputs_ND], bucket_bytes=outputs_ND.nbytes)
        return outputs_ND.requires_grad_(), computed[-1] if computed and engine is None else None

    def trial(self, units: Units, numbers: Indices, *, step: int, twice: bool) -> None:
        """Pass over one micro-batch with some gradient, to measure its memory and time.

        Args:
            twice: Pass over it without a graph before.
        """
        batch = self._batch(units, numbers)
        with self.noise(batch, numbers, units, step=step):
            if twice:
                with torch.no_grad():
                    self.pull.loss.outputs(batch)
            self.masters.backward(self.forward(batch, 1.0))

    def _batch(self, units: Units, numbers: Indices) -> MicroBatch:
        return self.arrangement.lay(units.batch(numbers)).to(self.device)
