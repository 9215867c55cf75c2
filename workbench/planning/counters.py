"""Counters of what is computed: floating-point operations, bytes that are alive, and bytes by what they are for.

Each is a mode that sees every operation on tensors inside of it, and costs little.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode, _push_mode
from torch.utils.flop_counter import flop_registry

ACTIVATIONS = "activations"


class DispatchMode(TorchDispatchMode, ABC):
    """Inside of it, each operation is handed to `called`.

    One that is entered right inside another takes its place, and asks it for results: torch would take as long to go
    from one to the next as either takes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outer: DispatchMode | None = None

    def __enter__(self) -> Self:
        outer = _get_current_dispatch_mode()
        if isinstance(outer, DispatchMode):
            self._outer = outer
            _pop_mode()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        if self._outer is not None:
            _push_mode(self._outer)
            self._outer = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in here, and keeping torch's compiler out takes as long as all else

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # what autograd asks of fake tensors, more often than all else
            return args[0].device
        return self.called(func, args, kwargs or {})

    @abstractmethod
    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Result of the operation; operations that run in here are not handed over again."""

    def computed(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Result of the operation, by the mode around this one if there is one."""
        return func(*args, **kwargs) if self._outer is None else self._outer.called(func, args, kwargs)


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Scores, and their products with the values, of every head of the query: it may have more than its keys.

    Torch's own formula refuses that up to 2.11, and knows no CPU's kernel. Masked scores count, too.
    """
    return 2 * query[..., 0].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Scores again, their gradients, and those of query, key and value."""
    return 2 * query[..., 0].numel() * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1])


def _grouped(rows: Tensor, other: Tensor, *_: Any, **__: Any) -> int:
    """Rows, sorted by group, with the matrix of each group; or columns with rows, for the gradients of the matrices."""
    return 2 * rows.numel() * other.shape[-1]


def _varlen(query_THD: Tensor, _: Tensor, value_TKD: Tensor, starts: Tensor, *more: Any, **__: Any) -> int:
    """As `_attention`, of packed rows."""
    return _pairs(query_THD, starts, more[1]) * 2 * (query_THD.shape[-1] + value_TKD.shape[-1])


def _varlen_backward(_: Tensor, query_THD: Tensor, __: Tensor, value_TKD: Tensor, *more: Any, **___: Any) -> int:
    """As `_attention_backward`, of packed rows."""
    return _pairs(query_THD, more[2], more[4]) * 2 * (3 * query_THD.shape[-1] + 2 * value_TKD.shape[-1])


def _pairs(query_THD: Tensor, starts: Tensor, longest: int) -> int:
    """Pairs of tokens of all heads; where nobody knows where rows begin, all are taken for the longest."""
    if isinstance(starts, FakeTensor):
        return query_THD.shape[1] * len(query_THD) * longest
    with unset_fake_temporarily():
        return query_THD.shape[1] * int((starts.diff().long() ** 2).sum())


_KERNELS = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
_aten = torch.ops.aten
_FORMULAS: dict[Any, Callable[..., int]] = {
    # Torch knows these two only where they write elsewhere.
    _aten.addmm_: flop_registry[_aten.addmm],
    _aten.baddbmm_: flop_registry[_aten.baddbmm],
    **flop_registry,
    _aten._grouped_mm: _grouped,
    _aten._scaled_mm_v2: flop_registry[_aten.mm],
    **{getattr(_aten, f"_scaled_dot_product_{name}"): _attention for name in _KERNELS},
    **{getattr(_aten, f"_scaled_dot_product_{name}_backward"): _attention_backward for name in _KERNELS},
}
_VARLEN = {"torch_attn._varlen_attn": _varlen, "torch_attn._varlen_attn_backward": _varlen_backward}
"""Attention of packed rows, by name: it is there once torch's module of it is imported."""
_QUANTISED = {f"bitsandbytes.{name}" for name in ("gemm_4bit", "gemv_4bit", "int8_linear_matmul", "int8_scaled_mm")}
"""Products with packed weights, by name: importing bitsandbytes takes a second."""


@cache
def _formula(func: Any) -> Callable[..., int] | None:
    """From a kernel's arguments and result to its floating-point operations: two for a multiplication and addition."""
    if str(func.overloadpacket) in _QUANTISED:
        return lambda inputs, *_, out_val, **__: 2 * out_val.numel() * inputs.shape[-1]
    return _VARLEN.get(str(func.overloadpacket)) or _FORMULAS.get(func.overloadpacket)


class Operations(DispatchMode):
    """Inside of it, operations are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self._known: dict[Hashable, int] = {}

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = self.computed(func, args, kwargs)
        if (formula := _formula(func)) is not None:
            key = (func, _shapes(args), _shapes((*kwargs, *kwargs.values())), _shapes((result,)))
            if key not in self._known:
                self._known[key] = int(formula(*args, **kwargs, out_val=result))
            self.count += self._known[key]
        return result


def _shapes(values: Sequence[Any]) -> tuple[Hashable, ...]:
    """All that a formula looks at: shapes of tensors, in nested lists too, and numbers."""
    return tuple(
        each.shape if isinstance(each, Tensor) else _shapes(each) if isinstance(each, (list, tuple)) else each
        for each in values
    )


_BRINGING = (
    torch.ops.aten.lift_fresh.default,
    torch.ops.aten.set_.source_Storage,
    torch.ops.aten.set_.source_Storage_storage_offset,
)  # operations that hand over what was just made outside of them, such as by torch.tensor(...)


_MAPPED = (torch.ops.aten.from_file.default,)
"""Operations whose values stand in a file, from where they are read when they are wanted."""


class LiveBytes(DispatchMode):
    """Inside of it, bytes of the storages that torch's operations make on a kind of device, until each is freed.

    A storage counts once, whoever looks at it, and a tensor that was there before not at all. So nothing counts twice
    where one stands inside another: the outer counts everything, the inner what is made inside it. What a kernel takes
    and frees while it runs is not seen, nor are values that numpy and memory-mapped files hold. On an accelerator this
    is for tensors without values: real ones its allocator counts (`torch.accelerator.max_memory_allocated`). `device`:
    kind of device, such as `cuda`.
    """

    now: int  # bytes alive
    peak: int  # the most that were alive at once

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self._device = device
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = self.computed(func, args, kwargs)
        new = [storage for storage in storages(result, self._device, []) if storage._cdata not in self._known]
        if new:
            # Whatever else comes in was there before.
            before = () if func in _BRINGING else storages((*args, *kwargs.values()), self._device, [])
            given = {storage._cdata for storage in before}
            for storage in new:
                there = func in _MAPPED or storage._cdata in given
                self._see(storage, 0 if there else storage.nbytes())
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


def storages(value: Any, device: str, listed: list[torch.UntypedStorage]) -> list[torch.UntypedStorage]:
    """`listed` with the storages of tensors in nested lists on such a device; of a sharded one its local shard."""
    if isinstance(value, Tensor):
        local = value.to_local() if isinstance(value, DTensor) else value
        if local.device.type == device and local.layout == torch.strided:
            listed.append(local.untyped_storage())
    elif isinstance(value, (list, tuple)):
        for each in value:
            storages(each, device, listed)
    return listed


class MemoryLedger(LiveBytes):
    """Live bytes by what they are for, `activations` unless somebody says otherwise."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self._purpose = ACTIVATIONS
        self._purposes: dict[int, str] = {}  # of each storage, by its address
        self._sums: Counter[str] = Counter()
        self._peak_sums: Mapping[str, int] | None = {}  # None: the present is the peak

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes alive at the peak, by what they are for."""
        return dict(self._sums if self._peak_sums is None else self._peak_sums)

    def alive(self, purpose: str) -> int:
        """Bytes for a purpose now."""
        return self._sums[purpose]

    def restart(self) -> None:
        """Look for a peak from now on only."""
        self.peak, self._peak_sums = self.now, None

    @contextmanager
    def making(self, purpose: str) -> Iterator[None]:
        """Assign tensors that are made inside the block to `purpose`."""
        before, self._purpose = self._purpose, purpose
        try:
            yield
        finally:
            self._purpose = before

    def hold(self, tensors: Iterable[Tensor], purpose: str) -> None:
        """Count tensors that existed before."""
        with self.making(purpose):
            for tensor in tensors:
                storage = tensor.untyped_storage()
                self._see(storage, storage.nbytes())

    def rename(self, tensors: Iterable[Tensor], purpose: str) -> None:
        """Assign tensors to another purpose than that known when they were made."""
        for tensor in tensors:
            address = tensor.untyped_storage()._cdata
            if address in self._purposes:
                size = tensor.untyped_storage().nbytes()
                self._sums[self._purposes[address]] -= size
                self._purposes[address] = purpose
                self._sums[purpose] += size

    def _see(self, storage: torch.UntypedStorage, size: int) -> None:
        address = storage._cdata
        if address not in self._known and size:
            self._purposes[address] = self._purpose
            self._sums[self._purpose] += size
        before = self.peak
        super()._see(storage, size)
        if self.peak > before:
            self._peak_sums = None

    def _forget(self, address: int, size: int) -> None:
        if self._peak_sums is None:
            self._peak_sums = dict(self._sums)
        if address in self._purposes:
            self._sums[self._purposes.pop(address)] -= size
        super()._forget(address, size)
