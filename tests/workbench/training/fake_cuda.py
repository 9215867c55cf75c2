"""An accelerator that is not there: fake tensors on a `cuda` device, and a count of all for which a host waits on it.

A CPU build of torch has no streams of such a device, which its autograd asks for. So torch's own code takes these
tensors for those of the meta device, and Python for those of `cuda:0`.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._dynamo  # before anything is patched that it looks at
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.models import backbones
from workbench.planning.fake_tensors import fake_tensors, real_tensors

CUDA = torch.device("cuda", 0)
aten = torch.ops.aten
READS = {aten._local_scalar_dense, aten.equal, aten.is_nonzero}
"""Operations whose value a host has to know before it goes on."""
SHAPED_BY_VALUES = {aten.nonzero, aten.masked_select, aten._unique2, aten.unique_consecutive, aten.unique_dim}
"""Operations whose shape it has to know."""
PINNED: set[int] = set()
"""Addresses of pinned memory."""


class Synchronisations(TorchDispatchMode):
    """Places at which the host waits for the accelerator, in the order in which they come."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet, device = func.overloadpacket, torch.device(kwargs.get("device") or "cpu")
        if packet is aten._to_copy and device.type == "cuda" and not _there(args[0]):
            self._copy(args[0], func, kwargs)
            return _like(args[0], kwargs.get("dtype"))
        if packet is aten.copy_ and _there(args[0]) != _there(args[1]):
            self._copy(args[1], func, {"non_blocking": len(args) > 2 and args[2]})
            if not isinstance(args[1], FakeTensor):
                args = (args[0], _like(args[1], None), *args[2:])
        elif packet is aten._to_copy and _there(args[0]) and "device" in kwargs and device.type == "cpu":
            if not kwargs.get("non_blocking"):
                self._note(func)
            with real_tensors():
                return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        elif packet is aten.arange and device.type == "cuda":
            return _like(func(*args, **{**kwargs, "device": torch.device("cpu")}), None)
        elif _there(args) and packet in READS | SHAPED_BY_VALUES:
            self._note(func)
        elif packet in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_) and _there(args[0]):
            masks = [each for each in args[1] if each is not None and each.dtype == torch.bool]
            if masks or any(each is not None and not _there(each) for each in args[1]):
                self._note(func)
        elif packet is aten.repeat_interleave and _there(args) and kwargs.get("output_size") is None:
            self._note(func)
        return func(*args, **kwargs)

    def _copy(self, source: Tensor, func: Any, kwargs: Any) -> None:
        """A copy between host and accelerator, which only from pinned memory waits for nothing."""
        if _there(source) or not (kwargs.get("non_blocking") and source.untyped_storage().data_ptr() in PINNED):
            self._note(func)

    def _note(self, func: Any) -> None:
        frames = traceback.extract_stack()
        stack = [each for each in frames if "/torch/" not in each.filename and each.filename != __file__]
        self.places.append(f"{func} at {stack[-1].filename}:{stack[-1].lineno} ({stack[-1].line})")


def _there(value: Any) -> bool:
    """Whether a tensor, or one of several, is on the accelerator."""
    if isinstance(value, (list, tuple)):
        return any(map(_there, value))
    return isinstance(value, FakeTensor) and value.fake_device.type == "cuda"


def _like(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=CUDA)


@contextmanager
def fake_cuda(patch: pytest.MonkeyPatch) -> Iterator[Synchronisations]:
    """Inside the block this process has an accelerator without values."""
    subclass, new = Tensor._make_subclass, FakeTensor.__new__

    def make(cls: Any, elem: Any, requires_grad: bool = False, **settings: Any) -> Any:
        if torch.device(settings.get("device_for_backend_keys") or "cpu").type == "cuda":
            return subclass(cls, elem, requires_grad)
        return subclass(cls, elem, requires_grad, **settings)

    def created(cls: Any, mode: Any, elem: Any, device: Any, *rest: Any, **settings: Any) -> Any:
        return new(cls, mode, elem, CUDA if torch.device(device).type == "meta" else device, *rest, **settings)

    def pinned(tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        PINNED.add(copy.untyped_storage().data_ptr())
        KEPT.append(copy)
        return copy

    patch.setattr(Tensor, "_make_subclass", staticmethod(make))
    patch.setattr(FakeTensor, "__new__", staticmethod(created))
    patch.setattr(Tensor, "pin_memory", pinned)
    patch.setattr(torch, "Event", _Event)
    patch.setattr(backbones, "device", lambda: CUDA)
    with fake_tensors(), Synchronisations() as found:
        yield found


class _Event:
    """The end of a copy, which has come: the host has read the loss since."""

    def __init__(self, device: torch.device) -> None:
        assert device == CUDA

    def record(self) -> None:
        """Begin."""

    def synchronize(self) -> None:
        """End."""


KEPT: list[Tensor] = []
"""Pinned memory, so that no address is given twice."""
