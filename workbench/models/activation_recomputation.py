"""Less activation memory: elementwise results are recomputed in the backward pass, and MLPs computed in tiles.

Elementwise: while a block computes, each elementwise operation is recorded with its operands. Where autograd would keep
its result, it keeps the record, and the operation runs again when the backward pass needs it. Products, attention and
sums of the residual stream are kept as ever, so nothing expensive is computed twice, and weights are unpacked as often
as before. The same kernels on the same operands give the same bits. It resembles selective activation recomputation
(Korthikanti et al. 2022, arXiv:2205.05198, section 5), which recomputes whole parts of a block. torch's own
(`create_selective_checkpoint_contexts`) calls the whole block again with its products looked up: weights would be
unpacked twice, and sums into a product (`addmm_`) be added twice.

Tiles: what an MLP computes between its inputs and outputs exists for one tile of tokens only, and each tile is computed
again in the backward pass (ALST, Rajbhandari et al. 2025, section 3.1; Liger's tiled MLP). Where the whole block is
recomputed, this costs no further pass: the block's recomputation ends before the MLP, whose inputs are the last that is
saved, so the MLP is computed twice in all, as without tiles. Gradients of trainable weights, such as LoRA's, are sums
over tiles, in float32 or wider. All else is as without tiles, dropout by rows too.

Legend: B rows, L tokens of each, T of a tile, D hidden.
"""

from __future__ import annotations

import inspect
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.adapters import anatomy, row_dropout
from workbench.adapters.banks.bank_layers import Routed
from workbench.adapters.row_dropout import RowDropout
from workbench.losses import chunked_loss
from workbench.losses.chunked_loss import wide

_ATEN = torch.ops.aten
ELEMENTWISE = {
    *(_ATEN._to_copy, _ATEN.clone, _ATEN.mul, _ATEN.div, _ATEN.neg, _ATEN.pow, _ATEN.rsqrt, _ATEN.exp),
    *(_ATEN.silu, _ATEN.gelu, _ATEN.relu, _ATEN.sigmoid, _ATEN.tanh, _ATEN.masked_fill),
    *(_ATEN.native_layer_norm, _ATEN._fused_rms_norm),
}  # operations whose first result takes about as long to compute as to read and write
_NOTING = ContextVar("noting", default=False)
LEAST_TILE = 1024
"""Tokens of an `auto` tile, at least; else the hidden size, so that a tile's activations are as large as the MLP's
weights."""
Mlp = Callable[[Tensor], Tensor]  # hidden states (B, T, D) to outputs (B, T, D)


class _Operand(NamedTuple):
    """An operand that stays in memory."""

    tensor: Tensor
    version: int

    def get(self) -> Tensor:
        assert self.tensor._version == self.version, "what a recomputed operation reads was overwritten"
        return self.tensor


@dataclass(eq=False)
class _Result:
    """Result of a recorded operation, as long as it may be needed."""

    make: Callable[[], Tensor]
    asked: int = 0  # how often autograd will need it
    made: Tensor | None = None

    def get(self) -> Tensor:
        """Compute it, and keep it while it will be needed again."""
        tensor = self.make() if self.made is None else self.made
        self.made = tensor if self.asked > 0 else None
        return tensor

    def settle(self) -> None:
        """Compute it now, and keep it."""
        made = self.get()
        self.make = lambda: made


class _View(NamedTuple):
    """A view of a result by autograd or another operation."""

    result: _Result
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def get(self) -> Tensor:
        return self.result.get().as_strided(self.size, self.stride, self.offset)


class _Notes(TorchDispatchMode):
    """Inside, elementwise operations are recorded."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results: dict[int, _Result] = {}
        """By the address of its storage, while that is alive: recording keeps nothing alive."""
        self._readers: defaultdict[int, list[weakref.ref[_Result]]] = defaultdict(list)
        """Results that read a storage, by its address."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in here

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for tensor in [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]:
                address = tensor.untyped_storage()._cdata
                self._results.pop(address, None)
                for reader in self._readers.pop(address, ()):
                    if (result := reader()) is not None:
                        result.settle()
            return func(*args, **kwargs)
        outcome = func(*args, **kwargs)
        if func._overloadpacket in ELEMENTWISE and any(_is_tensor(each) and each.requires_grad for each in args):
            self._note(outcome[0] if isinstance(outcome, tuple) else outcome, func, args, kwargs)
        return outcome

    def pack(self, tensor: Tensor) -> Tensor | _View:
        """What autograd keeps for a tensor."""
        seen = self._view(tensor)
        if seen is None:
            return tensor
        seen.result.asked += 1
        return seen

    def _note(self, outcome: Tensor, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        operands = [(self._view(each) or _Operand(each, each._version)) if _is_tensor(each) else each for each in args]
        kept = [each.tensor for each in operands if isinstance(each, _Operand)]
        if any(each.nbytes > outcome.nbytes for each in kept):
            return  # keeping the operands would cost more than it saves
        storage = outcome.untyped_storage()
        result = _Result(lambda: _again(func, operands, kwargs))
        self._results[storage._cdata] = result
        weakref.finalize(storage, self._results.pop, storage._cdata, None).atexit = False
        for each in kept:
            self._readers[each.untyped_storage()._cdata].append(weakref.ref(result))

    def _view(self, tensor: Tensor) -> _View | None:
        """The view of a recorded result; None for other tensors."""
        result = self._results.get(tensor.untyped_storage()._cdata)
        if result is None:
            return None
        return _View(result, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def close(self) -> None:
        """Drop everything that autograd does not keep."""
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
    """Result of `forward(*inputs)`, whose backward pass recomputes elementwise operations."""
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
    """Whether operations are recorded now: then none may overwrite a tensor without torch's knowledge."""
    return _NOTING.get()


def is_whole(block: Any) -> bool:
    """Whether a block is recomputed as a whole from its inputs."""
    call = getattr(block, "_gradient_checkpointing_func", None)
    return bool(getattr(block, "gradient_checkpointing", False)) and call is not recomputing_elementwise


@dataclass(frozen=True)
class Tiling:
    """When an MLP computes in tiles, and of how many tokens."""

    tokens: int
    block: tuple[nn.Module, ...]
    """Empty: always. The block of the MLP: only where the block is recomputed, or there are no gradients."""

    @property
    def is_on(self) -> bool:
        """Whether it computes in tiles now."""
        return all(each.training and is_whole(each) for each in self.block) or not torch.is_grad_enabled()


class Tiled(nn.Module):
    """Mixed into the class of an MLP: its forward pass in tiles of each row."""

    tiling: Tiling

    def forward(self, hidden_BLD: Tensor) -> Tensor:
        whole: Mlp = super().forward
        tokens = self.tiling.tokens
        if hidden_BLD.ndim != 3 or hidden_BLD.shape[1] <= tokens or not self.tiling.is_on:
            return whole(hidden_BLD)
        trained = [each for each in self.parameters() if each.requires_grad]
        if not (torch.is_grad_enabled() and (hidden_BLD.requires_grad or trained)):
            return _computed(whole, tokens, hidden_BLD)
        promise_BLD = _Inputs.apply(whole, tokens, hidden_BLD, *trained)  # type: ignore[no-untyped-call]
        output_BLD: Tensor = _Outputs.apply(promise_BLD, whole, tokens, hidden_BLD.detach())  # type: ignore[no-untyped-call]
        return output_BLD


def tile_mlps(model: nn.Module, tokens: int | Literal["auto"] | None) -> None:
    """Let the MLPs of a model's blocks compute in tiles from now on, where they can. `tokens`: tokens of each row in a
    tile; None: whole rows. `auto`: a number by the hidden size, where a block is recomputed in the backward pass or
    there is none."""
    if tokens is None:
        return
    for block in anatomy.decoder_layers(model):
        mlp: Any = getattr(block, "mlp", None)
        if tiling_refusal(block) is None and not isinstance(mlp, Tiled):
            many = max(LEAST_TILE, _width(mlp)) if tokens == "auto" else tokens
            mlp.tiling = Tiling(many, (block,) if tokens == "auto" else ())
            mlp.__class__ = type(type(mlp).__name__, (Tiled, type(mlp)), {"__module__": type(mlp).__module__})


def tiling_refusal(block: nn.Module) -> str | None:
    """Why the MLP of a block cannot compute in tiles; None where it can."""
    mlp = getattr(block, "mlp", None)
    parameters = list(inspect.signature(type(mlp).forward).parameters.values()) if isinstance(mlp, nn.Module) else []
    one = len(parameters) == 2 and parameters[1].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    if not isinstance(mlp, nn.Module) or not one:
        return f"{type(block).__name__} has no MLP that takes hidden states alone"
    for module in mlp.modules():
        if isinstance(module, Routed):
            return "the layers of a bank count the tokens of each member"
        if isinstance(module, nn.Dropout) and module.p and not isinstance(module, RowDropout):
            return f"{type(mlp).__name__} drops values by numbers that depend on what else is computed"
    for module in _own(mlp):
        known = anatomy.is_linear(module) or "norm" in type(module).__name__.lower()
        if not known and any(True for _ in module.parameters(recurse=False)):
            return f"{type(mlp).__name__} has {type(module).__name__} beside its linear layers"
    return None


def _own(module: nn.Module) -> Iterator[nn.Module]:
    """The modules of a backbone, without those of adapters over them."""
    if isinstance(module, BaseTunerLayer):  # bottlenecks and copies stand inside what they change, and do not hold it
        base = dict(module.named_children()).get("base_layer")
        yield from () if base is None else _own(base)
        return
    yield module
    for child in module.children():
        yield from _own(child)


def _width(mlp: nn.Module) -> int:
    """Hidden size."""
    return next(anatomy.features(each)[0] for each in mlp.modules() if anatomy.is_linear(each))


def _tiles(tokens: int, length: int) -> Iterator[tuple[int, int]]:
    """First token of each tile, and the token after its last."""
    return ((start, min(start + tokens, length)) for start in chunked_loss.wanted_parts(range(0, length, tokens)))


def _computed(whole: Mlp, tokens: int, hidden_BLD: Tensor) -> Tensor:
    """The outputs (B, L, D), without a graph."""
    output_BLD = None
    with torch.no_grad():
        for start, stop in _tiles(tokens, hidden_BLD.shape[1]):
            with row_dropout.among(start, stop):
                part_BTD = whole(hidden_BLD[:, start:stop].contiguous())
            if output_BLD is None:
                output_BLD = part_BTD.new_empty(*hidden_BLD.shape[:2], part_BTD.shape[-1])
            output_BLD[:, start:stop] = part_BTD
    assert output_BLD is not None, "a row has tokens"
    return output_BLD


class _Inputs(torch.autograd.Function):
    """Saves the inputs of an MLP, and gives a promise of its outputs: their shape, without values.

    It comes before anything is computed, so that a recomputation that looks for what is saved stops here.
    """

    @staticmethod
    def forward(ctx: Any, whole: Mlp, tokens: int, hidden_BLD: Tensor, *trained: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_BLD)
        ctx.whole, ctx.tokens, ctx.trained = whole, tokens, trained
        return hidden_BLD.new_empty(()).expand(hidden_BLD.shape)

    @staticmethod
    def backward(ctx: Any, grad_BLD: Tensor) -> tuple[Tensor | None, ...]:
        (hidden_BLD,), trained = ctx.saved_tensors, ctx.trained
        hidden_grad = torch.empty_like(hidden_BLD) if ctx.needs_input_grad[2] else None
        sums = [torch.zeros_like(each, dtype=wide(each.dtype)) for each in trained]
        for start, stop in _tiles(ctx.tokens, hidden_BLD.shape[1]):
            part_BTD = hidden_BLD[:, start:stop].detach().contiguous().requires_grad_(hidden_grad is not None)
            with torch.enable_grad(), row_dropout.among(start, stop):
                output_BTD = ctx.whole(part_BTD)
            wanted = [*([part_BTD] if hidden_grad is not None else []), *trained]
            grads = list(torch.autograd.grad(output_BTD, wanted, grad_BLD[:, start:stop], allow_unused=True))
            if hidden_grad is not None:
                hidden_grad[:, start:stop] = grads.pop(0)
            for sum_, grad in zip(sums, grads, strict=True):
                if grad is not None:
                    sum_ += grad
            del output_BTD, grads
        return None, None, hidden_grad, *(sum_.to(each.dtype) for sum_, each in zip(sums, trained, strict=True))


class _Outputs(torch.autograd.Function):
    """Keeps a promise: computes the outputs, whose gradient is that of the promise."""

    @staticmethod
    def forward(ctx: Any, promise_BLD: Tensor, whole: Mlp, tokens: int, hidden_BLD: Tensor) -> Tensor:
        return _computed(whole, tokens, hidden_BLD)

    @staticmethod
    def backward(ctx: Any, grad_BLD: Tensor) -> tuple[Tensor | None, ...]:
        return grad_BLD, None, None, None
