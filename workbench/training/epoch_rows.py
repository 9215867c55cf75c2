"""Rows of a bank's members in a micro-batch, in a pass over their data, and collated together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from workbench.data.batching import Examples, Indices
from workbench.data.packing import JoinedRows, OwnerRows, RowLayout, laid_together
from workbench.training.adapter_trainer import AdapterTrainer


class EpochRows(NamedTuple):
    """Rows of a member in a micro-batch, and all of them as a pass over its data sees them."""

    member: AdapterTrainer
    indices: Indices
    epoch: int
    seen: Examples


def of(members: Sequence[AdapterTrainer], parts: Sequence[OwnerRows]) -> list[EpochRows]:
    """The rows of a micro-batch of the next step, of members by their places."""
    owned = [(members[part.owner], part.indices) for part in parts]
    return [EpochRows(member, indices, member.epoch, member.seen) for member, indices in owned]


def joined(rows: Sequence[EpochRows], arrangement: RowLayout) -> JoinedRows:
    """The micro-batch that they make, laid out."""
    owned = [seen.batch(indices, epoch=epoch) for _, indices, epoch, seen in rows]
    numbered = [each.numbered(indices, seen.lengths) for each, (_, indices, _, seen) in zip(owned, rows, strict=True)]
    return JoinedRows(laid_together(owned, arrangement), [len(each.labels_N) for each in owned], numbered)


def key(rows: Sequence[EpochRows]) -> Hashable:
    """A name of the rows, by which a micro-batch that was collated before is known."""
    return tuple((id(member), id(seen), indices.tobytes(), epoch) for member, indices, epoch, seen in rows)
