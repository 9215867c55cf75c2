"""Live bytes by purpose and by place of creation, at every moment and at the peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from workbench.planning.live_bytes import LiveBytes

ACTIVATIONS = "activations"
ELSEWHERE, BACKWARD = "head and loss", "backward pass"


class Account(NamedTuple):
    """Bytes are alike that are for the same and were made at the same place."""

    purpose: str
    place: str


class MemoryLedger(LiveBytes):
    """Live bytes by what they are for, `activations` unless somebody says otherwise, and by where they were made."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self._purpose = ACTIVATIONS
        self._places: list[str] = []
        """Modules that are being called, the innermost last."""
        self._accounts: dict[int, Account] = {}
        self._sums: Counter[Account] = Counter()
        self._peak_sums: Mapping[Account, int] | None = {}
        """None: the present is the peak."""

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes alive at the peak, by what they are for."""
        return self._at_peak("purpose")

    @property
    def places_at_peak(self) -> dict[str, int]:
        """Bytes alive at the peak, by where they were made or are at home."""
        return {place: size for place, size in self._at_peak("place").items() if size}

    def alive(self, purpose: str) -> int:
        """Bytes for a purpose now."""
        return sum(size for account, size in self._sums.items() if account.purpose == purpose)

    def restart(self) -> None:
        """Look for a peak from now on only."""
        self.peak, self._peak_sums = self.now, None

    @contextmanager
    def making(self, purpose: str, place: str) -> Iterator[None]:
        """Assign tensors that are made inside the block to `purpose` at `place`."""
        before, self._purpose = self._purpose, purpose
        self._places.append(place)
        try:
            yield
        finally:
            self._purpose = before
            self._places.pop()

    @contextmanager
    def placing(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Inside the block, what is made while one of these modules is called was made there."""
        handles = []

        def leave(*_: Any) -> None:
            self._places.pop()

        for place, module in modules.items():
            handles.append(module.register_forward_pre_hook(lambda *_, place=place: self._places.append(place)))
            handles.append(module.register_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def hold(self, tensors: Iterable[Tensor], purpose: str, place: str = ELSEWHERE) -> None:
        """Count tensors that were there before, too."""
        with self.making(purpose, place):
            for tensor in tensors:
                storage = tensor.untyped_storage()
                self._see(storage, storage.nbytes())

    def rename(self, tensors: Iterable[Tensor], purpose: str, place: str = ELSEWHERE) -> None:
        """Assign tensors to another purpose than that known when they were made."""
        for tensor in tensors:
            address = tensor.untyped_storage()._cdata
            if address in self._accounts:
                size = tensor.untyped_storage().nbytes()
                self._sums[self._accounts[address]] -= size
                self._accounts[address] = Account(purpose, place)
                self._sums[self._accounts[address]] += size

    def _place(self) -> str:
        if self._places:
            return self._places[-1]
        return BACKWARD if torch._C._current_graph_task_id() != -1 else ELSEWHERE

    def _see(self, storage: torch.UntypedStorage, size: int) -> None:
        address = storage._cdata
        if address not in self._known and size:
            self._accounts[address] = account = Account(self._purpose, self._place())
            self._sums[account] += size
        before = self.peak
        super()._see(storage, size)
        if self.peak > before:
            self._peak_sums = None

    def _forget(self, address: int, size: int) -> None:
        if self._peak_sums is None:
            self._peak_sums = dict(self._sums)
        if address in self._accounts:
            self._sums[self._accounts.pop(address)] -= size
        super()._forget(address, size)

    def _at_peak(self, by: str) -> dict[str, int]:
        totals: Counter[str] = Counter()
        for account, size in (self._sums if self._peak_sums is None else self._peak_sums).items():
            totals[getattr(account, by)] += size
        return dict(totals)
