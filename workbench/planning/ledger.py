"""What the bytes of live tensors are for, at every moment and at the peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from workbench.live_bytes import LiveBytes

ACTIVATIONS = "activations"


class Ledger(LiveBytes):
    """Live bytes by what they are for: `activations`, unless somebody says otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.at_peak: dict[str, int] = {}
        """Bytes alive at the peak, by what they are for."""
        self._made_as = ACTIVATIONS
        self._names: dict[int, str] = {}
        self._sums: Counter[str] = Counter()

    @contextmanager
    def making(self, name: str) -> Iterator[None]:
        """What is made inside the block is for `name`."""
        before, self._made_as = self._made_as, name
        try:
            yield
        finally:
            self._made_as = before

    def hold(self, tensors: Iterable[Tensor], name: str) -> None:
        """Count tensors that were there before, too."""
        with self.making(name):
            for tensor in tensors:
                storage = tensor.untyped_storage()
                self._see(storage, storage.nbytes())

    def rename(self, tensors: Iterable[Tensor], name: str) -> None:
        """What these tensors are for was not known when they were made."""
        for tensor in tensors:
            address = tensor.untyped_storage()._cdata
            if address in self._names:
                size = tensor.untyped_storage().nbytes()
                self._sums[self._names[address]] -= size
                self._sums[name] += size
                self._names[address] = name

    def _see(self, storage: torch.UntypedStorage, size: int) -> None:
        address = storage._cdata
        if address not in self._known and size:
            self._names[address] = self._made_as
            self._sums[self._made_as] += size
        before = self.peak
        super()._see(storage, size)
        if self.peak > before:
            self.at_peak = dict(self._sums)

    def _forget(self, address: int, size: int) -> None:
        if address in self._names:
            self._sums[self._names.pop(address)] -= size
        super()._forget(address, size)
