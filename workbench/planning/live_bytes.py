"""How many bytes of tensors are alive: exact, where the resident memory of a process blurs them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
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
        self._known: set[int] = set()

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        # torch.tensor(...) hands over what it has just made; whatever else comes in was there before.
        if func is not torch.ops.aten.lift_fresh.default:
            for storage in _storages((*args, *kwargs.values()), self._device):
                self._see(storage, 0)
        result = func(*args, **kwargs)
        for storage in _storages(result, self._device):
            self._see(storage, storage.nbytes())
        return result

    def _see(self, storage: torch.UntypedStorage, size: int) -> None:
        address = storage._cdata  # of the storage itself, not of its values: empty ones have none
        if address in self._known:
            return
        self._known.add(address)
        weakref.finalize(storage, self._forget, address, size).atexit = False
        self.now += size
        self.peak = max(self.peak, self.now)

    def _forget(self, address: int, size: int) -> None:
        self._known.remove(address)
        self.now -= size


def _storages(value: Any, device: str) -> Iterator[torch.UntypedStorage]:
    """Those of the tensors in nested lists that are on such a device; of a tensor in shares this process's."""
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, Tensor):
        if value.device.type == device and value.layout == torch.strided:
            yield value.untyped_storage()
    elif isinstance(value, (list, tuple)):
        for each in value:
            if isinstance(each, (Tensor, list, tuple)):
                yield from _storages(each, device)
