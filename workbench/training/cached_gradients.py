"""Gradients of a loss that compares all rows of a global batch, in micro-batches of any size.

GradCache (Gao et al. 2021, arXiv:2101.06983, section 3): the outputs of all units (texts) of the batch are computed
without a graph, then the loss and its gradient with respect to the outputs, then each micro-batch again with a graph,
into which that gradient flows. So the loss sees the whole batch, and memory holds the graph of one micro-batch. Dropout
is a function of seed, step and unit, so that both passes compute the same. The last micro-batch keeps its first graph;
where it is the only one, there is a single pass.

Legend: N units of a global batch, U of a micro-batch, D numbers of an output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from workbench.data.batching import Examples, Indices, MicroBatch
from workbench.data.packing import RowLayout
from workbench.runs.ranks import Ranks
from workbench.training.distributed.row_shares import share_rows


class Units(Protocol):
    """Units that a model computes one by one, such as texts of which a row has several."""

    @property
    def lengths(self) -> Indices:
        """Tokens of each."""

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        """The units `indices`, padded."""


Terms = Callable[[], Iterator[Callable[[Tensor], Tensor]]]
"""Functions from the outputs (N, D) of a batch's units to scalars whose sum is the mean loss of its rows."""


class BatchLoss(NamedTuple):
    """The loss of the rows of a global batch."""

    units: Units
    numbers: Indices
    """Units (N,) of its rows, each once, ascending."""
    terms: Terms


class Noise(Protocol):
    """Dropout and other noise, a function of seed, step and unit."""

    def __call__(self, batch: MicroBatch, indices: Indices, seen: Units, *, step: int) -> AbstractContextManager[None]:
        """Around the forward and the backward pass of a micro-batch of the units `indices`."""


class GlobalLoss(Protocol):
    """A loss that compares the rows of a global batch with each other."""

    def of(self, seen: Examples, rows: Indices) -> tuple[Units, Indices, Terms]:
        """The loss of the rows `rows`, as a BatchLoss."""

    def outputs(self, batch: MicroBatch) -> Tensor:
        """The model's outputs (U, D) float32 for the units of a micro-batch."""


@dataclass(frozen=True)
class CachedGradients:
    """Adds up the gradients of a global batch."""

    loss: GlobalLoss
    arrangement: RowLayout
    """How the units of a micro-batch are laid out."""
    backward: Callable[[Tensor], None]
    """Adds to the gradients of what trains."""
    noise: Noise
    ranks: Ranks
    device: torch.device

    def add(self, seen: Examples, rows: Indices, *, step: int, tokens: int) -> Tensor:
        """Add the gradients of this process's share of the units; returns its share of the loss.

        All processes compute the whole loss, of which only the first one's counts.

        Args:
            tokens: In a micro-batch, padding included if there is any.
        """
        batch_loss = BatchLoss(*self.loss.of(seen, rows))
        shares = share_rows(
            batch_loss.numbers,
            batch_loss.units.lengths,
            self.arrangement,
            tokens=tokens,
            ranks=self.ranks,
            in_step=False,
        )
        parts = [share.rows for share in shares]
        outputs, kept = self._outputs(batch_loss, parts, step)
        outputs_ND = outputs.requires_grad_()
        loss = torch.zeros((), device=self.device)
        for term in batch_loss.terms():
            part = term(outputs_ND)
            part.backward()
            loss += part.detach()
        assert outputs_ND.grad is not None
        for number in reversed(range(len(parts))):
            gradient_UD = outputs_ND.grad[_places(batch_loss, parts[number]).to(self.device)]
            batch = self._batch(batch_loss.units, parts[number])
            with self.noise(batch, parts[number], batch_loss.units, step=step):
                if kept is None:
                    kept = self.loss.outputs(batch)
                self.backward((kept * gradient_UD).sum())
            kept = None  # memory holds one graph
        return loss if self.ranks.first else torch.zeros_like(loss)

    def trial(self, units: Units, numbers: Indices, *, step: int, twice: bool) -> None:
        """Pass over one micro-batch with some gradient, to find what it takes of memory and time.

        Args:
            twice: Pass over it without a graph before.
        """
        batch = self._batch(units, numbers)
        with self.noise(batch, numbers, units, step=step):
            if twice:
                with torch.no_grad():
                    self.loss.outputs(batch)
            self.backward(self.loss.outputs(batch).sum())

    def _outputs(self, batch_loss: BatchLoss, parts: list[Indices], step: int) -> tuple[Tensor, Tensor | None]:
        """Outputs (N, D) of all units, and those (U, D) of the last micro-batch with their graph."""
        computed: list[Tensor] = []
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            batch = self._batch(batch_loss.units, part)
            with self.noise(batch, part, batch_loss.units, step=step), torch.set_grad_enabled(last):
                computed.append(self.loss.outputs(batch))
        kept = computed[-1] if parts else None
        width = max(self.ranks.gathered(kept.shape[1] if kept is not None else 0))
        outputs_ND = torch.zeros(len(batch_loss.numbers), width, device=self.device)
        for part, own_UD in zip(parts, computed, strict=True):
            outputs_ND[_places(batch_loss, part).to(self.device)] = own_UD.detach()
        self.ranks.add_up([outputs_ND], bucket_bytes=outputs_ND.nbytes)
        return outputs_ND, kept

    def _batch(self, units: Units, numbers: Indices) -> MicroBatch:
        return self.arrangement.lay(units.batch(numbers)).to(self.device)


def _places(batch_loss: BatchLoss, numbers: Indices) -> Tensor:
    """Places of units among those of the batch."""
    return torch.from_numpy(np.searchsorted(batch_loss.numbers, numbers))
