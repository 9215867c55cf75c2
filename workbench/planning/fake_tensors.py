"""Tensors with shape, precision and device but without values: computing with them takes no memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConverter, FakeTensorMode, unset_fake_temporarily

from workbench.planning.dispatch_mode import DispatchMode
from workbench.planning.recall import Recall


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Inside the block, results computed from fake tensors are fake.

    What is computed from real ones alone, such as the masks and positions of a real batch, is real, so that decisions
    that depend on it are those of a run. A value that is read from a fake tensor is 1.
    """
    with warnings.catch_warnings(), _mode() as mode, _RealApart(mode):
        # Copying a module asks where its values lie, to find out whether some share memory.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        yield


def _mode() -> FakeTensorMode:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.fake_tensor_converter = _Forgetful()
    mode.cache_enabled = False  # what `Recall` knows is not asked for again, and keys to it take as long to make
    return mode


class _Forgetful(FakeTensorConverter):
    """Keeps no weak references to the tensors that it makes: a module can only convert its parameters without them."""

    def set_tensor_memo(self, t: Tensor, v: FakeTensor) -> None:
        """Nothing: a tensor on the meta device becomes a fake one once."""


@contextmanager
def real_tensors() -> Iterator[None]:
    """Inside the block, within `fake_tensors`, everything is as outside of it."""
    with unset_fake_temporarily():
        yield


def to_fake(model: nn.Module, device: torch.device) -> None:
    """Replace every tensor of a model on the meta device by a fake one; what is shared stays shared."""
    known: dict[int, Tensor] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                like = known.get(id(parameter))
                if like is None:
                    like = nn.Parameter(_like(parameter, device), requires_grad=parameter.requires_grad)
                    known[id(parameter)] = like
                module._parameters[name] = like  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = known.setdefault(id(buffer), _like(buffer, device))
        for holder in vars(module).values():  # the ids of PEFT's virtual tokens
            for key, tensor in holder.items() if isinstance(holder, dict) else ():
                if isinstance(tensor, Tensor) and tensor.is_meta:
                    holder[key] = _like(tensor, device)


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


class _RealApart(DispatchMode):
    """Computes real tensors for real, and fake ones with what is known of them."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._recall = Recall(mode, self._inferred)

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return self._recall(func, args, kwargs)

    def _inferred(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        tensors = list(_tensors((*args, *kwargs.values())))
        fakes = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        if fakes:
            if func in _READ:
                return True if func is not _SCALAR else _ONE.get(fakes[0].dtype, 1.0)
            instead = INSTEAD.get(str(func))
            return instead(*args, **kwargs) if instead else self.computed(func, args, kwargs)
        # Positions are real as the batch is: transformers looks at them to choose between ways to compute masks.
        if tensors or func.overloadpacket is torch.ops.aten.arange:
            with unset_fake_temporarily():
                return self.computed(func, args, kwargs)
        return self.computed(func, args, kwargs)


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    """Those in nested lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _grouped(*args: Any, **kwargs: Any) -> Any:
    """A product of groups, for which torch knows fake tensors in bfloat16 alone."""
    halves = [each.bfloat16() if isinstance(each, Tensor) and each.is_floating_point() else each for each in args]
    return torch.ops.aten._grouped_mm.default(*halves, **kwargs).to(args[0].dtype)


def _filled(tensor: Tensor, *_: Any) -> Tensor:
    """The tensor that values are copied into; torch gives another one where that changes their precision."""
    return tensor


def _read(tensor: Tensor, storage: torch.UntypedStorage) -> Tensor:
    """A tensor of as many elements as a file's values have, which are an adapter's."""
    return tensor.resize_(storage.nbytes() // tensor.element_size())


INSTEAD: dict[str, Callable[..., Any]] = {
    "aten._grouped_mm.default": _grouped,
    "aten.copy_.default": _filled,
    "aten.set_.source_Storage": _read,
}
"""Replacements for operations that fake tensors do not support, or that would seem to take memory, by their names."""
_SCALAR = torch.ops.aten._local_scalar_dense.default
_READ = (_SCALAR, torch.ops.aten.equal.default, torch.ops.aten.allclose.default)
"""Operations that read values."""
_ONE: dict[torch.dtype, bool | int] = {torch.bool: True, torch.int64: 1, torch.int32: 1, torch.uint8: 1}
