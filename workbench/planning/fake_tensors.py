"""Tensors with shape, precision and device but without values: computing with them takes no memory.

Layers are alike and torch takes long to infer the result of each operation, so that results are remembered.

Layers of bitsandbytes get fake weights, or those of a small model that is timed, packed as they are after loading.
8-bit layers keep the columns of their inputs that hold outliers in half precision. Which these are depends on weights
and rows, so that every column is taken for one: what is counted is the most that may be.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConverter, FakeTensorMode, unset_fake_temporarily
from transformers import PreTrainedTokenizerBase

from workbench.adapters.precision import expert_layers
from workbench.adapters.precision.fp8_layers import Fp8Linear
from workbench.config import ModelConfig
from workbench.config.model_heads import TEXT, ModelHead
from workbench.errors import ConfigError
from workbench.models import backbones
from workbench.models.backbones import Backbone
from workbench.planning.counters import DispatchMode


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Inside the block, results computed from fake tensors are fake.

    What is computed from real ones alone, such as the masks and positions of a real batch, is real, so that decisions
    that depend on it are those of a run. A value that is read from a fake tensor is 1.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    fake.fake_tensor_converter = _Forgetful()
    fake.cache_enabled = False  # what `Recall` knows is not asked for again, and keys to it take as long to make
    with warnings.catch_warnings(), fake as mode, _RealApart(mode):
        # Copying a module asks where its values lie, to find out whether some share memory.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        yield


class _Forgetful(FakeTensorConverter):
    """Keeps no weak references to the tensors that it makes: a module can only convert its parameters without them."""

    def set_tensor_memo(self, t: Tensor, v: FakeTensor) -> None:
        """Nothing: a tensor on the meta device becomes a fake one once."""


real_tensors = unset_fake_temporarily  # inside its block, within `fake_tensors`, everything is as outside of it


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
    """Computes real tensors for real, and infers the results of operations on fake ones."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._recall = Recall(mode, self._inferred)
        self._filled = 0
        """Places of a hidden state that pictures have filled last."""

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func is _FILL:
            self._filled = args[2].numel() // args[0].shape[-1]
        if func is _INDEX and isinstance(args[0], FakeTensor):
            indices = {place: each for place, each in enumerate(args[1]) if isinstance(each, Tensor)}
            if len(indices) == 1 and (mask := next(iter(indices.values()))).dtype == torch.bool:
                (place,), shape = indices, args[0].shape
                return args[0].new_empty((*shape[:place], self._named(mask), *shape[place + mask.ndim :]))
        return self._recall(func, args, kwargs)

    def _named(self, mask: Tensor) -> int:
        """How many places a mask names: where it has no values, those that pictures fill (DeepStack), or all that an
        adapter knows of."""
        if isinstance(mask, FakeTensor) and mask.ndim == 1:
            return mask.numel()
        if isinstance(mask, FakeTensor):
            if not self._filled:
                raise ConfigError(
                    "a plan has no pictures' values, by which this backbone's tower picks places. Run it without a "
                    "plan, or plan the text of the rows alone: data.ignore='[images, image]'"
                )
            return self._filled
        with unset_fake_temporarily():
            return int(mask.sum())

    def _inferred(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        tensors = list(_tensors((*args, *kwargs.values())))
        fakes = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        if fakes:
            if func in _READ:
                return True if func is not _SCALAR else _ONE.get(fakes[0].dtype, 1.0)
            instead = INSTEAD.get(str(func))
            return instead(*args, **kwargs) if instead else self.computed(func, args, kwargs)
        # Positions are real as the batch is: transformers looks at them to choose between ways to compute masks.
        # So are integers that begin at zero: places of real positions are written into them (Gemma 4's tower).
        counts = func.overloadpacket is _ZEROS and kwargs.get("dtype") == torch.int64
        if tensors or counts or func.overloadpacket is torch.ops.aten.arange:
            with unset_fake_temporarily():
                return self.computed(func, args, kwargs)
        return self.computed(func, args, kwargs)


def _none_of(tensor: Tensor) -> Tensor:
    """False for each element, as a real tensor: whoever asks for infinities goes on where there are none."""
    with real_tensors():
        return torch.zeros((), dtype=torch.bool).expand(tensor.shape)


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


INSTEAD: dict[str, Callable[..., Any]] = {
    "aten._grouped_mm.default": _grouped,
    "aten.copy_.default": lambda tensor, *_: tensor,  # torch gives another where copying changes the precision
    "aten.set_.source_Storage": lambda tensor, storage: tensor.resize_(storage.nbytes() // tensor.element_size()),
    "aten.isinf.default": _none_of,
}  # replacements for operations that fake tensors do not support, or that would seem to take memory, by their names
_FILL, _INDEX = torch.ops.aten.masked_scatter.default, torch.ops.aten.index.Tensor
_ZEROS = torch.ops.aten.zeros
_SCALAR = torch.ops.aten._local_scalar_dense.default
_READ = (_SCALAR, torch.ops.aten.equal.default, torch.ops.aten.allclose.default)  # operations that read values
_ONE: dict[torch.dtype, bool | int] = {torch.bool: True, torch.int64: 1, torch.int32: 1, torch.uint8: 1}


_Like = tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype, torch.device]
"""All that is to be known of a fake tensor: shape, strides, its first element in the storage, dtype and device."""
Infer = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
"""From an operation with its arguments to its result."""


class _Given(NamedTuple):
    """Result of an operation for such arguments."""

    outputs: tuple[_Like, ...]
    viewed: bool  # whether they share the storage of the first argument
    several: type | None  # type of the container of several tensors; None for a single tensor
    nothing: bool = False
    """Whether it changes the values of its arguments and gives nothing; without outputs, others give the first."""


_KNOWN: dict[Hashable, _Given | None] = {}
"""Results of all dry runs of this process: those of one plan repeat each other's operations."""


class Recall:
    """Operations that give fake tensors: each result is inferred once for the same kinds of arguments."""

    def __init__(self, mode: FakeTensorMode, infer: Infer) -> None:
        self._mode, self._infer = mode, infer
        self._attributes: dict[torch.device, dict[str, Any]] = {}
        """Attributes of a fake tensor on each device, copied at once because torch takes long to set each."""

    def __call__(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Result of `func`; real tensors among its arguments are always computed with."""
        imagines = torch._C._get_dispatch_mode(_FAKE) is not None  # or what it makes is real for a while
        kinds: list[Hashable] = [func, imagines, torch.get_default_dtype()]
        tables = getattr(func, "namespace", "") == "bitsandbytes"
        if not (_describe(args, kinds, tables=tables) and _describe((*kwargs, *kwargs.values()), kinds)):
            return self._infer(func, args, kwargs)
        key, first = tuple(kinds), args[0] if args else None
        if (given := _KNOWN.get(key)) is not None:
            if not given.outputs:
                return None if given.nothing else first
            made = [self._tensor(like, first if given.viewed else None) for like in given.outputs]
            return made[0] if given.several is None else given.several(made)
        address = _address(first)
        result = self._infer(func, args, kwargs)
        if key not in _KNOWN:
            changed = isinstance(first, FakeTensor) and (_described(first), _address(first)) != (kinds[3], address)
            _KNOWN[key] = None if changed else _given(result, args, kwargs)
        return result

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


def _described(tensor: FakeTensor) -> _Like:
    return tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype, tensor.fake_device


def _describe(values: Sequence[Any], kinds: list[Hashable], *, tables: bool = False) -> bool:
    """Append all that decides a result; False where real values are among the arguments. `tables`: these are but the
    codes of packed weights, on which no shape depends."""
    for value in values:
        if isinstance(value, FakeTensor):
            if value.layout is not torch.strided or value.is_complex():
                return False
            kinds.append(_described(value))
        elif isinstance(value, Tensor):
            if not tables:
                return False
            kinds.append(("table", value.shape, value.dtype))
        elif isinstance(value, (list, tuple)):
            kinds.append(len(value))
            if not _describe(value, kinds, tables=tables):
                return False
        else:
            kinds.append((type(value), value))  # 1 and 1.0 are equal, and give other precisions
    return True


def _given(result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Given | None:
    """The result as a recipe for the next call; None where it may differ or is put together otherwise."""
    first = args[0] if args else None
    if result is first or (result is None and isinstance(first, (list, tuple))):  # steps of optimizers, over lists
        return _Given((), viewed=False, several=None, nothing=result is None)
    several = type(result) if type(result) in (list, tuple) else None
    outputs = [result] if several is None else list(result)
    if not outputs or not all(isinstance(each, FakeTensor) for each in outputs):
        return None
    theirs = {_address(each) for each in outputs}
    viewed = theirs == {_address(first)}
    if not viewed and (len(theirs) < len(outputs) or theirs & set(map(_address, _tensors((*args, *kwargs.values()))))):
        return None
    likes = tuple(map(_described, outputs))
    if any(dtype.is_complex or (offset and not viewed) for _, _, offset, dtype, _ in likes):
        return None
    return _Given(likes, viewed, several)


def _address(value: Any) -> int | None:
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


FILLED = 2**24
"""Elements of a tensor that get values; the rest of a larger one stays as the system gives it, and takes no memory."""
BYTES = {"int8": 1.0, "nf4": 0.5, "fp4": 0.5}  # bytes of a packed weight's element


def pack(model: nn.Module, weights: str, compute: torch.dtype) -> None:
    """Give the quantised layers of a model packed weights."""
    from bitsandbytes.functional import quantize_4bit  # a second to import, and most plans need none of it
    from bitsandbytes.nn import modules

    with real_tensors():
        quantize_4bit(torch.zeros(64, 64), compress_statistics=True)  # makes tables that later runs use too
    for module in model.modules():
        if isinstance(module, modules.Linear4bit):
            shape, device = (module.out_features, module.in_features), module.weight.device
            whole = torch.zeros(*shape, dtype=compute, device=device)
            packed, state = quantize_4bit(whole, compress_statistics=_twice(module), quant_type=weights)
            if isinstance(packed, FakeTensor):
                module.weight = Params4bit.of(packed, state)
            else:
                module.weight = modules.Params4bit(packed, quant_state=state, quant_type=weights, bnb_quantized=True)
            module.support_avx512bf16_for_cpu = False
        elif isinstance(module, modules.Linear8bitLt):
            shape, device = (module.out_features, module.in_features), module.weight.device
            packed = torch.zeros(*shape, dtype=torch.int8, device=device)
            scales = torch.ones(shape[0], dtype=torch.float32, device=device)
            if isinstance(packed, FakeTensor):
                module.weight = Int8Params.of(packed, scales)
            else:
                module.weight = modules.Int8Params(
                    packed, requires_grad=False, has_fp16_weights=False, CB=packed, SCB=scales
                )
        elif isinstance(module, Fp8Linear) and not isinstance(module.weight, FakeTensor):
            module.weight.zero_()
            module.weight_scale.fill_(1)
    for experts in expert_layers.packed_experts(model):
        for name, each in expert_layers.matrices(experts).items():
            whole = torch.zeros(each.shape, dtype=compute, device=each.device)
            packed, state = quantize_4bit(whole, compress_statistics=True, quant_type=weights)
            fake = isinstance(packed, FakeTensor)
            weight = Params4bit.of(packed, state) if fake else modules.Params4bit(packed, quant_state=state)
            experts._parameters[name] = expert_layers.keep(experts, name, weight, each.shape)


def _twice(layer: Any) -> bool:
    """Whether a 4-bit layer's scales are quantised, too; a blueprint says so where they arrive otherwise."""
    return bool(getattr(layer, "compress_statistics", True))


def packed_bytes(model: nn.Module, weights: str) -> int:
    """Bytes of a blueprint's weights once its quantised layers are packed, their scales left out."""
    whole = sum(each.nbytes for each in model.parameters())
    if weights not in BYTES:
        return whole
    from bitsandbytes.nn.modules import Linear4bit, Linear8bitLt

    layers = [each.weight for each in model.modules() if isinstance(each, (Linear4bit, Linear8bitLt))]
    layers += chain.from_iterable(
        expert_layers.matrices(experts).values() for experts in expert_layers.packed_experts(model)
    )
    return whole - sum(each.nbytes - round(each.numel() * BYTES[weights]) for each in layers)


def _with_outliers(rows: Tensor, threshold: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Rows (N, I) in 8 bits, their scales, and the columns that hold outliers: all."""
    packed, scales, _ = torch.ops.bitsandbytes.int8_vectorwise_quant.default(rows)
    return packed, scales, torch.empty(rows.shape[-1], dtype=torch.int64, device=rows.device)


def _mixed_product(rows: Tensor, packed: Tensor, weight_OI: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    """The product (N, O) of rows with a packed weight, and a copy of the columns that hold outliers."""
    return rows.new_empty(*packed.shape[:-1], len(weight_OI)), torch.empty_like(rows)


INSTEAD["bitsandbytes.int8_vectorwise_quant.default"] = _with_outliers
INSTEAD["bitsandbytes.int8_mixed_scaled_mm.default"] = _mixed_product


class Params4bit(FakeTensor):
    """A packed weight, of the name by which PEFT knows bitsandbytes' and unpacks them, as for the norms of DoRA."""

    quant_state: Any

    @classmethod
    def of(cls, packed: Tensor, state: Any) -> nn.Parameter:
        """The fake values with how they are packed."""
        weight = nn.Parameter(packed, requires_grad=False)
        weight.__class__ = cls  # type: ignore[assignment]
        weight.quant_state = state  # type: ignore[attr-defined]
        weight.compress_statistics, weight.quant_type = state.nested, state.quant_type  # type: ignore[attr-defined]
        return weight

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return self.of(self.detach().clone(), self.quant_state)


class Int8Params(FakeTensor):
    """A packed weight that stays one where a module moves or copies its parameters, as PEFT does for some methods."""

    CB: Tensor | None
    SCB: Tensor | None

    @classmethod
    def of(cls, packed: Tensor, scales: Tensor | None) -> nn.Parameter:
        """The fake values with the scales of their outputs; None: the layer holds both already."""
        weight = nn.Parameter(packed, requires_grad=False)
        weight.__class__ = cls  # type: ignore[assignment]
        weight.CB, weight.SCB = (None if scales is None else weight), scales  # type: ignore[attr-defined]
        return weight

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """Elsewhere, or in another precision, in which it is no packed weight."""
        moved: Tensor = super().to(*args, **kwargs)
        return moved if moved is self or moved.dtype != self.dtype else self.of(moved, self.SCB)

    def detach(self) -> Tensor:
        """The same values."""
        return self.of(super().detach(), self.SCB)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return self.of(super().detach().clone(), self.SCB)


class BlueprintLoader:
    """In place of `backbones.load`: inside `fake_tensors` backbones are fake, outside they have random values."""

    def __init__(self) -> None:
        self.loaded: list[Backbone] = []

    def __call__(
        self,
        config: ModelConfig,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        task: ModelHead = TEXT,
        trainable: bool = False,
        waiting: bool = False,
    ) -> Backbone:
        vocabulary = 0 if tokenizer is None else len(tokenizer)
        with real_tensors():
            backbone = backbones.blueprint(config, vocabulary=vocabulary, task=task, trainable=trainable)
        settle(backbone.model, backbone)
        self.loaded.append(backbone)
        return backbone


def settle(model: nn.Module, blueprint: Backbone) -> None:
    """Turn a blueprint, `model` if it is with an adapter, into the backbone that `backbones.load` gives.

    Inside `fake_tensors` it is fake, outside it is real, with random values.
    """
    to_fake(model, backbones.device())
    if not any(isinstance(each, FakeTensor) for each in model.parameters()):
        # Fill the tensors of a model with small random numbers; of a large one, only its beginning (`FILLED`).
        numbers = torch.randn(2**16) / 32
        with torch.no_grad():
            for tensor in chain(model.parameters(), model.buffers()):
                if tensor.is_floating_point():
                    flat = tensor.detach().reshape(-1)[:FILLED]
                    flat.copy_(numbers.to(tensor).repeat(-(-len(flat) // len(numbers)))[: len(flat)])
                elif tensor.dtype == torch.int64:
                    tensor.zero_()
    if blueprint.weights in backbones.QUANTISED:
        pack(model, blueprint.weights, blueprint.compute)
