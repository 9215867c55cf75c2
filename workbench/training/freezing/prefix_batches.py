"""Batches in which the rows of a run go through the frozen blocks, so that the cache depends on the data alone.

The last bits of a product depend on its shape. Were a row computed with whichever rows a step lacks, a resumed run,
whose memory begins empty, would go on with other bits than one that was never stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from workbench.data.batching import Examples, Indices, micro_batches
from workbench.training.freezing.cached_prefix import UnpaddedRows

CPU_TOKENS = 1024
"""Padded tokens of a batch on a CPU, where more are not faster."""


@dataclass(frozen=True)
class BatchPlace:
    """Rows that are computed together, by the examples that have them."""

    examples: Examples
    indices: Indices
    keys: frozenset[bytes]

    def chosen(self, rows: UnpaddedRows) -> UnpaddedRows:
        """These rows among those of the examples, each once."""
        firsts = {key: number for number, key in reversed(list(enumerate(rows.keys))) if key in self.keys}
        numbers = sorted(firsts.values())
        types = None if rows.types is None else [rows.types[number] for number in numbers]
        return UnpaddedRows([rows.keys[n] for n in numbers], [rows.tokens[n] for n in numbers], types)


class PrefixBatches:
    """Each different row in the first batch, of similar length, that it comes in.

    Args:
        sets: Of rows that are the same in every epoch.
        read: Gives the rows of a model's inputs; see `cached_prefix.reader`.
        tokens: Of a batch, padding included; a longer row has one of its own. A resumed run needs the same.
    """

    def __init__(
        self,
        sets: Sequence[Examples],
        read: Callable[[Mapping[str, Tensor]], UnpaddedRows | None],
        *,
        tokens: int = CPU_TOKENS,
    ) -> None:
        self._read = read
        self._places: dict[bytes, BatchPlace] = {}
        for examples in sets:
            for indices in micro_batches(np.arange(len(examples.lengths)), examples.lengths, tokens=tokens):
                self._add(examples, indices)

    def of(self, key: bytes) -> UnpaddedRows | None:
        """The rows that this one is computed with, itself among them; None where no set has it."""
        place = self._places.get(key)
        return None if place is None else place.chosen(self._rows(place.examples, place.indices))

    def _add(self, examples: Examples, indices: Indices) -> None:
        keys = self._rows(examples, indices).keys
        new = frozenset(keys) - self._places.keys()
        if len(keys) == len(indices):  # else an example has several rows, as the answers of a pair
            firsts = dict(zip(keys[::-1], indices[::-1], strict=True))
            indices = np.array([firsts[key] for key in new], dtype=np.int64)
        self._places.update(dict.fromkeys(new, BatchPlace(examples, np.sort(indices), new)))

    def _rows(self, examples: Examples, indices: Indices) -> UnpaddedRows:
        unpadded = self._read(examples.batch(indices).inputs)
        assert unpadded is not None, "micro-batches are padded on the right"
        return unpadded
