"""Losses of the rows of a step, as the training computes them anyway, for samplers and for `evaluate.dynamics`.

Observers change no bit of the training. What they need to go on after a restart is in checkpoints.

Legend: B rows of a step, N labels of a micro-batch, V visits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workbench.adapters.method import TrainHook
from workbench.config import TrainingSections
from workbench.data.batching import Indices, MicroBatch
from workbench.losses.label_losses import LabelLosses, LabelTap
from workbench.runs.ranks import Ranks
from workbench.training.checkpoints import Checkpointed
from workbench.training.optim.schedules import total_steps


class HostCopies:
    """Asynchronous copies of tensors from an accelerator to the host; on a CPU nothing is copied."""

    def __init__(self) -> None:
        self._sent: torch.Event | None = None

    def send(self, tensor: Tensor) -> Tensor:
        """The tensor on the host, which may be read only after `arrive`."""
        if tensor.device.type == "cpu":
            return tensor
        copy = tensor.to("cpu", non_blocking=True)
        self._sent = torch.Event(tensor.device)
        self._sent.record()
        return copy

    def arrive(self) -> None:
        """Wait until everything that was sent has arrived."""
        if self._sent is not None:
            self._sent.synchronize()
            self._sent = None


Floats32 = npt.NDArray[np.float32]
MOST_VISITS = 1_000_000
"""Visits of rows up to which `evaluate.dynamics=auto` records each; 16 bytes each in a checkpoint."""


class RowLosses(NamedTuple):
    """Rows that this process computed in an optimizer step, in arbitrary order."""

    rows: Indices
    """Numbers (B,) of the examples in the training data."""
    loss_B: Floats32
    """Mean loss of the row's labels, in nats, not multiplied by the row's weight."""
    probability_B: Floats32
    """Mean probability of the row's labels; exp(-loss) where it has one."""
    right_B: Floats32
    """Share of the row's labels that the model ranks first."""
    label_losses: tuple[Floats32, ...] = ()
    """Loss of each label of each row, if requested; else empty."""


class RowLossObserver(TrainHook, Protocol):
    """Receives the losses of the rows of each step; all processes call `state` at once."""

    def rows_done(self, step: int, losses: RowLosses) -> None:
        """Optimizer step `step` (counted from 1) was done with these rows."""


class RowLossWatch:
    """Collects the losses of a step's rows from its micro-batches, and passes them to the observers."""

    def __init__(self, tap: LabelTap | None = None) -> None:
        self._tap = tap
        self._parts: list[tuple[Indices, Tensor, LabelLosses]] = []
        self._copies = HostCopies()
        self.observers: dict[str, RowLossObserver] = {}
        """By the name of their file in a checkpoint."""

    def begin(self) -> None:
        """Start a step, or start it again."""
        self._parts = []

    @contextmanager
    def of(self, rows: Indices, batch: MicroBatch) -> Iterator[None]:
        """Around the forward pass of a micro-batch; collects nothing where `rows` is empty."""
        if self._tap is None or not self.observers or not len(rows):
            yield
            return
        with self._tap.listening() as parts:
            yield
        row_N = batch.row_of_label
        # A loss over the vocabulary appends positions without a label.
        label_losses = LabelLosses(*(torch.cat(each)[: len(row_N)] for each in zip(*parts, strict=True)))
        self.add(rows, row_N, label_losses)

    def add(self, rows: Indices, row_N: Tensor, losses: LabelLosses) -> None:
        """Add losses of the labels of some rows, which are copied to the host while the device goes on.

        Args:
            row_N: The row of each label, as an index of `rows`.
        """
        sent = (self._copies.send(each) for each in losses)
        self._parts.append((rows, self._copies.send(row_N), LabelLosses(*sent)))

    def done(self, step: int) -> None:
        """End the step: pass the losses to the observers."""
        if self._parts and self.observers:
            losses = self.collected()
            for observer in self.observers.values():
                observer.rows_done(step, losses)

    def collected(self, *, labels: bool = False) -> RowLosses:
        """The losses since `begin`, which the observers do not receive then.

        Args:
            labels: Whether to include the loss of each label.
        """
        self._copies.arrive()
        parts, self._parts = self._parts, []
        return joined([_of_rows(*part, labels=labels) for part in parts])

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the block nothing is collected, as in a second pass over the same rows."""
        kept = list(self._parts)
        try:
            yield
        finally:
            self._parts = kept


def joined(parts: Sequence[RowLosses]) -> RowLosses:
    """The losses of all parts, one after another."""
    kinds: list[Any] = [np.int64, np.float32, np.float32, np.float32]
    rows, loss_B, probability_B, right_B = (
        np.concatenate([np.empty(0, kind), *(part[at] for part in parts)]) for at, kind in enumerate(kinds)
    )
    labels = tuple(chain.from_iterable(part.label_losses for part in parts))
    return RowLosses(rows, loss_B, probability_B, right_B, labels)


def _of_rows(rows: Indices, row_N: Tensor, losses: LabelLosses, *, labels: bool) -> RowLosses:
    """Means over the labels of each row; labels are in the order of their rows."""
    at_N, loss_N = row_N.numpy(), losses.loss_N.double().numpy()
    labels_B = np.bincount(at_N, minlength=len(rows))
    count_B = np.maximum(labels_B, 1)
    values = (loss_N, np.exp(-loss_N), losses.right_N.double().numpy())
    loss_B, probability_B, right_B = (
        (np.bincount(at_N, each, minlength=len(rows)) / count_B).astype(np.float32) for each in values
    )
    by_row = tuple(np.split(losses.loss_N.float().numpy(), np.cumsum(labels_B)[:-1])) if labels else ()
    return RowLosses(rows, loss_B, probability_B, right_B, by_row)


class Visits(NamedTuple):
    """Every visit of a row in training (V,), by step and, within a step, by row."""

    step: npt.NDArray[np.int32]
    row: npt.NDArray[np.int32]
    loss: Floats32
    probability: Floats32
    right: Floats32


class VisitRecord(Checkpointed):
    """Records the losses of each row in each step that trained on it.

    The record is the same for any micro-batches, numbers of processes and restarts, up to the last bits of a loss.

    Args:
        records: Whether this process records, as one of the processes that compute the same rows.
    """

    def __init__(self, ranks: Ranks, *, records: bool = True) -> None:
        self._ranks, self._records = ranks, records
        self._known = _joined([])
        self._new: list[Visits] = []

    def rows_done(self, step: int, losses: RowLosses) -> None:
        """Record these."""
        steps, rows = np.full(len(losses.rows), step, dtype=np.int32), losses.rows.astype(np.int32)
        if self._records:
            self._new.append(Visits(steps, rows, losses.loss_B, losses.probability_B, losses.right_B))

    def visits(self) -> Visits:
        """All visits of all processes; each process must call it."""
        new = [each for part in self._ranks.gathered(self._new) for each in part]
        self._known, self._new = _joined([self._known, *new]), []
        return self._known

    def state(self) -> dict[str, Tensor]:
        """All visits."""
        return {name: torch.from_numpy(each) for name, each in self.visits()._asdict().items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        self._known, self._new = Visits(**{name: tensor.numpy() for name, tensor in state.items()}), []


def record(config: TrainingSections, rows: int, ranks: Ranks) -> VisitRecord | None:
    """The record that `evaluate.dynamics` asks for; None where it asks for none.

    Args:
        rows: Number of rows in one pass over the data.
    """
    wanted = config.evaluate.dynamics
    steps = total_steps(config, rows)
    few = steps is not None and steps * config.batch.size <= MOST_VISITS and config.distributed.sequence == 1
    first = ranks.rank % config.distributed.tensor == 0
    return VisitRecord(ranks, records=first) if wanted is True or (wanted == "auto" and few) else None


def _joined(parts: list[Visits]) -> Visits:
    kinds: list[Any] = [np.int32, np.int32, np.float32, np.float32, np.float32]
    whole = [
        np.concatenate([np.empty(0, kind), *each]).astype(kind)
        for kind, each in zip(kinds, zip(*parts, strict=True) if parts else [[]] * len(kinds), strict=True)
    ]
    order = np.lexsort((whole[1], whole[0]))
    return Visits(*(each[order] for each in whole))
