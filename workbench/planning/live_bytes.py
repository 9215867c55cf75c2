"""How many bytes of tensors are alive: exact, where the resident memory of a process blurs them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from workbench.planning.dispatch_mode import DispatchMode


class LiveBytes(DispatchMode):
    """Inside of it, bytes of the storages that torch's operations make on a kind of device, until each is freed.

    A storage counts once, whoever looks at it, and a tensor that was there before not at all. So nothing counts twice
    where one stands inside another: the outer counts everything, the inner what is made inside it. What a kernel
    takes and frees while it runs is not seen, nor are values that numpy and memory-mapped files hold. On an accelerator
    this is for tensors without values: real ones its allocator counts (`torch.accelerator.max_memory_allocated`).

    Args:
        device: Kind of device, such as `cuda`.
    """

    now: int
    """Bytes alive."""
    peak: int
    """The most that were alive at once."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self._device = device
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = self.computed(func, args, kwargs)
        new = [storage for storage in _storages(result, self._device, []) if storage._cdata not in self._known]
        if new:
            # Whatever else comes in was there before.
            before = () if func in _BRINGING else _storages((*args, *kwargs.values()), self._device, [])
            given = {storage._cdata for storage in before}
            for storage in new:
                self._see(storage, 0 if storage._cdata in given else storage.nbytes())
        return result

    def _see(self, storage: torch.UntypedStorage, size: int) -> None:
        address = storage._cdata  # of the storage itself, not of its values: empty ones have none
        if address in self._known:
            return
        self._known[address] = weakref.ref(storage, lambda _: self._forget(address, size))
        self.now += size
        self.peak = max(self.peak, self.now)

    def _forget(self, address: int, size: int) -> None:
        del self._known[address]
        self.now -= size


_BRINGING = (
    torch.ops.aten.lift_fresh.default,
    torch.ops.aten.set_.source_Storage,
    torch.ops.aten.set_.source_Storage_storage_offset,
)
"""Operations that hand over what was just made outside of them, such as by torch.tensor(...)."""


def _storages(value: Any, device: str, listed: list[torch.UntypedStorage]) -> list[torch.UntypedStorage]:
    """`listed` with those of the tensors in nested lists that are on such a device; of one in shares this process's."""
    if isinstance(value, Tensor):
        local = value.to_local() if isinstance(value, DTensor) else value
        if local.device.type == device and local.layout == torch.strided:
            listed.append(local.untyped_storage())
    elif isinstance(value, (list, tuple)):
        for each in value:
            _storages(each, device, listed)
    return listed
