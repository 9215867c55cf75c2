"""Remembered results of operations on fake tensors: layers are alike, and torch takes long to infer each."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_Like = tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype, torch.device]
"""All that is to be known of a fake tensor: shape, strides, its first element in the storage, dtype and device."""
Infer = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
"""From an operation with its arguments to its result."""


class _Given(NamedTuple):
    """Result of an operation for such arguments."""

    outputs: tuple[_Like, ...]
    viewed: bool
    """Whether they share the storage of the first argument."""
    several: type | None
    """Type of the container of several tensors; None for a single tensor."""
    nothing: bool = False
    """Whether it changes the values of its arguments and gives nothing; without outputs, others give the first."""


class Recall:
    """Operations that give fake tensors: each result is inferred once for the same kinds of arguments."""

    def __init__(self, mode: FakeTensorMode, infer: Infer) -> None:
        self._mode, self._infer = mode, infer
        self._known: dict[Hashable, _Given | None] = {}
        self._attributes: dict[torch.device, dict[str, Any]] = {}
        """Attributes of a fake tensor on each device, copied at once because torch takes long to set each."""

    def __call__(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Result of `func`; real tensors among its arguments are always computed with."""
        imagines = torch._C._get_dispatch_mode(_FAKE) is not None  # or what it makes is real for a while
        kinds: list[Hashable] = [func, imagines, torch.get_default_dtype()]
        if not (_describe(args, kinds) and _describe((*kwargs, *kwargs.values()), kinds)):
            return self._infer(func, args, kwargs)
        key, first = tuple(kinds), args[0] if args else None
        if (given := self._known.get(key)) is not None:
            return self._made(given, first)
        address = _address(first)
        result = self._infer(func, args, kwargs)
        if key not in self._known:
            changed = isinstance(first, FakeTensor) and (_like(first), _address(first)) != (kinds[3], address)
            self._known[key] = None if changed else _given(result, args, kwargs)
        return result

    def _made(self, given: _Given, first: Any) -> Any:
        if not given.outputs:
            return None if given.nothing else first
        made = [self._tensor(like, first if given.viewed else None) for like in given.outputs]
        return made[0] if given.several is None else given.several(made)

    def _tensor(self, like: _Like, viewed: FakeTensor | None) -> FakeTensor:
        shape, stride, offset, dtype, device = like
        with torch._C._DisableTorchDispatch():
            if viewed is None:
                inner = torch.empty_strided(shape, stride, dtype=dtype, device=_META)
            else:
                inner = torch.empty(0, dtype=dtype, device=_META)
                inner.set_(viewed.untyped_storage(), offset, shape, stride)
        attributes = self._attributes.get(device)
        if attributes is None:
            made = FakeTensor(self._mode, inner, device)
            self._attributes[device] = dict(vars(made))
            return made
        made = Tensor._make_subclass(FakeTensor, inner, False, dispatch_device=True, device_for_backend_keys=device)
        torch._C._set_warn_deprecated_on_mutable_data_ptr(made)  # copying a module asks where values lie
        vars(made).update(attributes)
        return made


_META = torch.device("meta")
_FAKE = torch._C._TorchDispatchModeKey.FAKE


def _like(tensor: FakeTensor) -> _Like:
    return tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype, tensor.fake_device


def _describe(values: Sequence[Any], kinds: list[Hashable]) -> bool:
    """Append what decides about results; False where that cannot be said, as real values are among it."""
    for value in values:
        if isinstance(value, FakeTensor):
            if value.layout is not torch.strided or value.is_complex():
                return False
            kinds.append(_like(value))
        elif isinstance(value, Tensor):
            return False
        elif isinstance(value, (list, tuple)):
            kinds.append(len(value))
            if not _describe(value, kinds):
                return False
        else:
            kinds.append((type(value), value))  # 1 and 1.0 are equal, and give other precisions
    return True


def _given(result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Given | None:
    """None for what is not alike each time, or not put together as simply."""
    first = args[0] if args else None
    if result is first or (result is None and isinstance(first, (list, tuple))):  # steps of optimizers, over lists
        return _Given((), viewed=False, several=None, nothing=result is None)
    several = type(result) if type(result) in (list, tuple) else None
    outputs = [result] if several is None else list(result)
    if not outputs or not all(isinstance(each, FakeTensor) for each in outputs):
        return None
    theirs = {_address(each) for each in outputs}
    viewed = theirs == {_address(first)}
    if not viewed and (len(theirs) < len(outputs) or theirs & set(_addresses((*args, *kwargs.values())))):
        return None
    likes = tuple(map(_like, outputs))
    if any(dtype.is_complex or (offset and not viewed) for _, _, offset, dtype, _ in likes):
        return None
    return _Given(likes, viewed, several)


def _address(value: Any) -> int | None:
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _addresses(values: Sequence[Any]) -> list[int | None]:
    """Addresses of the storages of tensors in nested lists."""
    addresses = []
    for value in values:
        addresses += _addresses(value) if isinstance(value, (list, tuple)) else [_address(value)]
    return [each for each in addresses if each is not None]
