"""Results of elementwise operations that are computed again in the backward pass, and not kept for it.

While a block computes, each elementwise operation is noted with its operands. Where autograd would keep its result, it
keeps that note, and the operation is carried out again when the backward pass asks. Products, attention and sums of
the residual stream are kept as ever: nothing dear is computed twice, and weights are unpacked as often as before. The
same kernels on the same operands give the same bits.

Close to selective activation recomputation (Korthikanti et al. 2022, arXiv:2205.05198, section 5), which computes whole
parts of a block again, and keeps what is between them. torch's own (`create_selective_checkpoint_contexts`) calls the
whole block again, with its products looked up: weights would be unpacked twice, and sums into a product (`addmm_`) be
added twice.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten
ELEMENTWISE = {
    *(_ATEN._to_copy, _ATEN.clone, _ATEN.mul, _ATEN.div, _ATEN.neg, _ATEN.pow, _ATEN.rsqrt, _ATEN.exp),
    *(_ATEN.silu, _ATEN.gelu, _ATEN.relu, _ATEN.sigmoid, _ATEN.tanh, _ATEN.masked_fill),
    *(_ATEN.native_layer_norm, _ATEN._fused_rms_norm),
}
"""Operations whose first result takes about as long to compute as to read and to write."""
_NOTING = ContextVar("noting", default=False)


class _Operand(NamedTuple):
    """A tensor that an operation reads, and that stays in memory."""

    tensor: Tensor
    version: int

    def get(self) -> Tensor:
        assert self.tensor._version == self.version, "what a recomputed operation reads was overwritten"
        return self.tensor


@dataclass(eq=False)
class _Result:
    """Outcome of an operation, as long as somebody may ask for it."""

    make: Callable[[], Tensor]
    asked: int = 0
    """How often autograd will ask for it."""
    made: Tensor | None = None

    def get(self) -> Tensor:
        """Computed now, or a moment ago: it stays while it will be asked for again."""
        tensor = self.make() if self.made is None else self.made
        self.made = tensor if self.asked > 0 else None
        return tensor

    def settle(self) -> None:
        """Compute it now, and keep it."""
        made = self.get()
        self.make = lambda: made


class _View(NamedTuple):
    """A result as autograd, or another operation, looks at it."""

    result: _Result
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def get(self) -> Tensor:
        return self.result.get().as_strided(self.size, self.stride, self.offset)


class _Notes(TorchDispatchMode):
    """Inside of it, elementwise operations are noted."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results: dict[int, _Result] = {}
        """By the address of its storage, for as long as that is alive: nothing that is read stays longer by itself."""
        self._readers: defaultdict[int, list[weakref.ref[_Result]]] = defaultdict(list)
        """Results that read a storage which stays."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in here

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            self._before_writing([each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)])
            return func(*args, **kwargs)
        outcome = func(*args, **kwargs)
        if func._overloadpacket in ELEMENTWISE and any(_is_tensor(each) and each.requires_grad for each in args):
            self._note(outcome[0] if isinstance(outcome, tuple) else outcome, func, args, kwargs)
        return outcome

    def pack(self, tensor: Tensor) -> Tensor | _View:
        """Whatever autograd keeps of a tensor."""
        seen = self._view(tensor)
        if seen is None:
            return tensor
        seen.result.asked += 1
        return seen

    def _note(self, outcome: Tensor, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        operands = [(self._view(each) or _Operand(each, each._version)) if _is_tensor(each) else each for each in args]
        kept = [each.tensor for each in operands if isinstance(each, _Operand)]
        if any(each.nbytes > outcome.nbytes for each in kept):
            return  # what would have to stay is more than what is saved
        storage = outcome.untyped_storage()
        result = _Result(lambda: _again(func, operands, kwargs))
        self._results[storage._cdata] = result
        weakref.finalize(storage, self._results.pop, storage._cdata, None).atexit = False
        for each in kept:
            self._readers[each.untyped_storage()._cdata].append(weakref.ref(result))

    def _view(self, tensor: Tensor) -> _View | None:
        """None of a tensor that is no result of an operation noted."""
        result = self._results.get(tensor.untyped_storage()._cdata)
        if result is None:
            return None
        return _View(result, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _before_writing(self, tensors: Sequence[Tensor]) -> None:
        """Operations that write into their operands: what others read there is computed before."""
        for tensor in tensors:
            address = tensor.untyped_storage()._cdata
            self._results.pop(address, None)
            for reader in self._readers.pop(address, ()):
                if (result := reader()) is not None:
                    result.settle()

    def close(self) -> None:
        """Forget everything that autograd does not keep."""
        self._results.clear()
        self._readers.clear()


def _is_tensor(each: object) -> bool:
    return isinstance(each, Tensor)


def _again(func: Any, operands: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    outcome = func(*(each.get() if isinstance(each, (_Operand, _View)) else each for each in operands), **kwargs)
    first: Tensor = outcome[0] if isinstance(outcome, tuple) else outcome
    return first


def _unpack(packed: Tensor | _View) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    packed.result.asked -= 1
    with torch.no_grad():
        return packed.get()


def recomputing_elementwise(forward: Callable[..., Any], *inputs: Any) -> Any:
    """Result of `forward(*inputs)`, whose backward pass computes elementwise operations again."""
    if not torch.is_grad_enabled():
        return forward(*inputs)
    notes, token = _Notes(), _NOTING.set(True)
    try:
        with saved_tensors_hooks(notes.pack, _unpack), notes:
            return forward(*inputs)
    finally:
        _NOTING.reset(token)
        notes.close()


def is_noting() -> bool:
    """Whether operations are noted now: then none may overwrite a tensor behind torch's back."""
    return _NOTING.get()


def is_whole(block: Any) -> bool:
    """Whether all that a block computes is computed again, from its inputs."""
    call = getattr(block, "_gradient_checkpointing_func", None)
    return bool(getattr(block, "gradient_checkpointing", False)) and call is not recomputing_elementwise
