"""Rows that several processes compute together, each a part of the tokens.

The parts are even: rows are padded at their ends to a multiple of the processes. Which token each position predicts is
known before rows are cut, so that the last position of a part predicts the first token of the next.

Legend: B rows, L tokens of them, l of a part, N supervised positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.config.sections.distributed_config import DistributedConfig
from workbench.data.batching import Indices, MicroBatch
from workbench.data.packing import MASK, NO_MASK, RowLayout
from workbench.models.sequence_attention import SequenceGroup
from workbench.runs.ranks import Ranks
from workbench.training.distributed.sharding import Loss, mesh


def group(section: DistributedConfig, ranks: Ranks) -> SequenceGroup:
    """The processes that compute the same rows as this one.

    A process that is alone plans what the last of them does, with the answers: these stand at the ends of rows.
    """
    size = section.sequence
    if size == 1 or ranks.alone:
        return SequenceGroup(size - 1, size)
    return SequenceGroup(ranks.rank % size, size, mesh(ranks.world, size).get_group("group"))


def arranged(whole: RowLayout, own: SequenceGroup) -> RowLayout:
    """An arrangement of this process's part of each row."""
    return whole if own.size == 1 else RowParts(whole, own)


def within(loss: Loss, own: SequenceGroup) -> Loss:
    """A loss of rows in parts, whose attention exchanges heads with the other processes."""
    if own.size == 1:
        return loss

    def shared(batch: MicroBatch, scale: float) -> Tensor:
        inputs: dict[str, Any] = {**batch.inputs, "sequence": own}
        return loss(replace(batch, inputs=inputs), scale)

    return shared


class RowParts(RowLayout):
    """Rows of which this process holds a part of the tokens."""

    def __init__(self, whole: RowLayout, own: SequenceGroup) -> None:
        self._whole, self._own = whole, own

    @property
    def packed(self) -> bool:
        """Whether rows lie one after another in one sequence, which is cut."""
        return self._whole.packed

    def cut(self, indices: Indices, lengths: Indices, *, tokens: int) -> Iterator[Indices]:
        """Micro-batches of which a part has at most `tokens`."""
        return self._whole.cut(indices, self._part(lengths), tokens=tokens)

    def tokens(self, lengths_B: Indices) -> int:
        """Those of a part."""
        return self._whole.tokens(self._part(lengths_B))

    def pairs(self, lengths_B: Indices) -> int:
        """A process computes all pairs for its heads."""
        return -(-self._whole.pairs(lengths_B) // self._own.size)

    def lay(self, padded: MicroBatch) -> MicroBatch:
        """This process's part of the rows, with the positions that it predicts from."""
        batch = self._whole.lay(padded)
        ids_BL, size = batch.inputs["input_ids"], self._own.size
        length = ids_BL.shape[1]
        more = -length % size
        part = (length + more) // size
        start = self._own.number * part
        position_BL = batch.inputs.get("position_ids", torch.arange(length)[None])
        inputs = {
            "input_ids": F.pad(ids_BL, (0, more))[:, start : start + part],
            "position_ids": _longer(position_BL, more)[:, start : start + part].expand(len(ids_BL), -1),
            MASK: torch.zeros(NO_MASK, dtype=torch.bool),
        }
        if self.packed:
            rows = batch.inputs["row_lengths"]
            rows = torch.cat([rows, rows.new_tensor([more])]) if more else rows
            inputs |= {"row_lengths": rows, "row_starts": F.pad(rows.cumsum(0), (1, 0)).int()}
        column_N = batch.positions_N % length - start
        own_N = (column_N >= 0) & (column_N < part)
        return replace(
            batch,
            inputs=inputs,
            positions_N=(batch.positions_N // length * part + column_N)[own_N],
            labels_N=batch.labels_N[own_N],
            weights_N=None if batch.weights_N is None else batch.weights_N[own_N],
            lengths_B=None,
        )

    def _part(self, lengths: Indices) -> Indices:
        part_lengths: Indices = -(-lengths // self._own.size)
        return part_lengths


def _longer(position_BL: Tensor, more: int) -> Tensor:
    """Positions of so many further tokens, a row of their own that nobody looks at."""
    return torch.cat([position_BL, torch.arange(more).expand(len(position_BL), -1)], dim=1)
