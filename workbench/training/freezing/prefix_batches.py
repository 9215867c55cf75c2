"""Batches in which the rows of a run go through the frozen blocks, so that the cache depends on the data alone.

The last bits of a product depend on its shape. Were a row computed with whichever rows a step lacks, a resumed run,
whose memory begins empty, would go on with other bits than one that was never stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from torch import Tensor

from workbench.data.batching import Examples, Indices, micro_batches
from workbench.training.freezing.cached_prefix import UnpaddedRows

CPU_TOKENS = 1024
"""Padded tokens of a batch on a CPU, where more are not faster."""


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
        self._places: dict[bytes, tuple[Examples, Indices]] = {}
        for examples in sets:
            for indices in micro_batches(np.arange(len(examples.lengths)), examples.lengths, tokens=tokens):
                self._add(examples, indices)

    def of(self, key: bytes) -> UnpaddedRows | None:
        """The rows that this one is computed with, itself among them; None where no set has it."""
        place = self._places.get(key)
        return None if place is None else self._rows(*place)

    def _add(self, examples: Examples, indices: Indices) -> None:
        firsts = {
            key: index for index, key in zip(indices[::-1], self._rows(examples, indices).keys[::-1], strict=True)
        }
        new = {key: index for key, index in firsts.items() if key not in self._places}
        place = examples, np.array(sorted(new.values()), dtype=np.int64)
        self._places.update(dict.fromkeys(new, place))

    def _rows(self, examples: Examples, indices: Indices) -> UnpaddedRows:
        found = self._read(examples.batch(indices).inputs)
        assert found is not None, "micro-batches are padded on the right"
        return found
