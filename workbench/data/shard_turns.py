"""The shards of a streamed data set in turn, with a position that says how far each was read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

OPEN = 8
"""Shards that are read in turn: data sets are often sorted, and a run then sees more than their beginning."""


@dataclass
class OpenShard:
    """A shard that is being read."""

    number: int
    dataset: Any
    """An IterableDataset of Arrow tables."""
    tables: Iterator[Any]

    @classmethod
    def begun(cls, dataset: Any, number: int, state: dict[str, Any] | None, *, rows: int) -> OpenShard:
        """A shard of a data set, from a state on; from its beginning where there is none."""
        shard = dataset.shard(num_shards=dataset.num_shards, index=number)
        if state is not None:
            shard.load_state_dict(state)
        return cls(number, shard, shard.iter(batch_size=rows))


@dataclass
class ShardTurns:
    """Reads a table from each of OPEN shards in turn; when one ends, the next in a seeded order takes its place.

    The shuffling of `datasets` has a buffer, whose rows are lost where another reading goes on.

    Args:
        dataset: An IterableDataset of Arrow tables.
        rows: Of a table.
        position: Where another reading stood; None: the beginning.
    """

    dataset: Any
    rows: int
    seed: int
    position: dict[str, Any] | None = None
    _open: list[OpenShard] = field(default_factory=list, init=False)
    _begun: int = field(default=0, init=False)
    """Shards that were opened so far."""
    _turn: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.position is None:
            return
        self._begun, self._turn = self.position["begun"], self.position["turn"]
        for number, state in self.position["open"]:
            self._open.append(OpenShard.begun(self.dataset, number, state, rows=self.rows))

    def __iter__(self) -> Iterator[Any]:
        order = np.random.default_rng([self.seed, 15]).permutation(self.dataset.num_shards).tolist()
        while True:
            while len(self._open) < OPEN and self._begun < len(order):
                number = order[self._begun]
                self._open.append(OpenShard.begun(self.dataset, number, None, rows=self.rows))
                self._begun += 1
            if not self._open:
                return
            self._turn %= len(self._open)
            table = next(self._open[self._turn].tables, None)
            if table is None:
                del self._open[self._turn]
            else:
                self._turn += 1
                yield table

    def state(self) -> dict[str, Any]:
        """The position after the last table, as JSON."""
        states = [(each.number, each.dataset.state_dict()) for each in self._open]
        return {"begun": self._begun, "turn": self._turn, "open": states}
