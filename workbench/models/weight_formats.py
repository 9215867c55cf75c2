"""How weights are stored: half precision under another compute precision, FP8, and 8 and 4 bits by bitsandbytes.

Half-precision weights for devices that would emulate half-precision products stay as they are; each product converts
the one matrix that it needs, in the forward and again in the backward pass, so that no converted copy is kept.

Quantised are the linear layers inside the repeated blocks (GPT-2's Conv1D too), except gates and T5's `wo`, and in 4
bits the experts that transformers keeps in one fused parameter. Nothing else is: embeddings, norms, output and
classification heads and projections outside the blocks are small or decide about every token.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.integrations.bitsandbytes import Bnb4bitQuantize, replace_with_bnb_linear
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name, should_convert_module
from transformers.utils.quantization_config import QuantizationMethod

from workbench.adapters import anatomy
from workbench.adapters.precision import expert_layers, fp8_layers
from workbench.adapters.precision.fp8_layers import Fp8Linear
from workbench.adapters.target_modules import only_read
from workbench.errors import BackboneError
from workbench.models import fp8_weights
from workbench.models.fp8_weights import Fp8Settings

HALVES = (torch.bfloat16, torch.float16)
FORMATS = ("int8", "nf4", "fp4", "fp8")
GATE = 64  # a layer with fewer outputs than this, and at least 16 times as many inputs, is a gate


class StoredLinear(nn.Linear):
    """A linear layer with a half-precision weight that computes in the input's dtype."""

    def forward(self, input: Tensor) -> Tensor:
        return _product(input, self.weight, self.bias)


class StoredConv1D(Conv1D):
    """GPT-2's linear layer, likewise."""

    def forward(self, x: Tensor) -> Tensor:
        return _product(x, self.weight.T, self.bias)


class OutputLinear(nn.Linear):
    """The last layer of a classification head, which computes in float32 whatever precision the rest has.

    A bfloat16 number has 8 bits, so that logits of many rows would be equal, and their probabilities with them.
    """

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input.float(), self.weight.float(), None if self.bias is None else self.bias.float())


def _product(input: Tensor, weight_OI: Tensor, bias: Tensor | None) -> Tensor:
    bias = None if bias is None else bias.to(input.dtype)
    if weight_OI.dtype == input.dtype or weight_OI.requires_grad:
        return F.linear(input, weight_OI.to(input.dtype), bias)
    # As one matrix: with a bias, a product of more dimensions would be a view, which must not be changed in place.
    output: Tensor = _StoredProduct.apply(input.flatten(0, -2), weight_OI, bias)  # type: ignore[no-untyped-call]
    return output.view(*input.shape[:-1], len(weight_OI))


class _StoredProduct(torch.autograd.Function):
    """Input (N, I), N positions, I inputs, O outputs; the weight has no gradient."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight_OI: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight_OI)
        return F.linear(input, weight_OI.to(input.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        (weight_OI,) = ctx.saved_tensors
        input_grad = grad @ weight_OI.to(grad.dtype) if ctx.needs_input_grad[0] else None
        return input_grad, None, grad.sum(0) if ctx.needs_input_grad[2] else None


_STORED: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: StoredLinear, Conv1D: StoredConv1D}


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Make every linear layer and embedding that is stored in half precision compute in `dtype`.

    Other floating-point parameters are converted; quantised ones stay as they are.
    """
    stored: set[int] = set()
    for module in model.modules():
        if type(module) in _STORED:
            module.__class__ = _STORED[type(module)]
            stored.add(id(module.weight))
        elif isinstance(module, nn.Embedding):
            module.register_forward_hook(_Convert(dtype))
            stored.add(id(module.weight))
    for parameter in model.parameters():
        if id(parameter) not in stored and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    for buffer in model.buffers():
        if buffer.dtype in HALVES:
            buffer.data = buffer.data.to(dtype)


def compute_as_stored(model: nn.Module, dtype: torch.dtype) -> None:
    """Undo `compute_in`, with all parameters in `dtype`: what is converted later computes in its own precision."""
    plain = {stored: kind for kind, stored in _STORED.items()}
    for module in model.modules():
        module.__class__ = plain.get(type(module), type(module))
        for key in [key for key, hook in module._forward_hooks.items() if isinstance(hook, _Convert)]:
            del module._forward_hooks[key]
    nn.Module.to(model, dtype)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters as stored, quantisation constants included; shared tensors count once."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in held(model)}.values())


def held(model: nn.Module, *, recurse: bool = True) -> Iterator[Tensor]:
    """All parameters as stored, with the constants of quantised ones; without `recurse` those of one module."""
    for parameter in model.parameters(recurse):
        yield parameter
        state = getattr(parameter, "quant_state", None)
        while state is not None:  # double quantisation: the constants have a state of their own
            yield from (value for value in vars(state).values() if isinstance(value, Tensor))
            state = state.state2
        constants = getattr(parameter, "SCB", None)
        if isinstance(constants, Tensor):
            yield constants
    modules = model.modules() if recurse else (model,)
    yield from (module.weight_scale for module in modules if isinstance(module, Fp8Linear))


class _Convert:
    """A forward hook that gives the output in another precision."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, _: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
        return output.to(self.dtype)


def quantisation_settings(
    weights: str, compute: torch.dtype, skeleton: PreTrainedModel, reader: HfQuantizer | None = None
) -> BitsAndBytesConfig | Fp8Settings:
    """How transformers quantises this backbone while it loads.

    Args:
        skeleton: The backbone without its weights.
        reader: Dequantises weights that arrive in another format.

    Returns:
        Settings by which 4-bit scales are themselves quantised (double quantisation; Dettmers et al. 2023,
        arXiv:2305.14314, section 3): 4 + 8 / 64 + 32 / (64 * 256) = 4.127 bits a weight.

    Raises:
        BackboneError: No layer can be quantised, or a quantised layer could not compute its inputs.
    """
    left = unquantised(skeleton)
    # transformers replaces exactly these two classes, not subclasses such as Falcon's.
    known = [name for name in linear_layers(skeleton) if type(skeleton.get_submodule(name)) in (nn.Linear, Conv1D)]
    if not set(known) - set(left):
        raise BackboneError(
            f"model.weights={weights}: the blocks of {type(skeleton).__name__} hold no linear layers that can be "
            "quantised. Write model.weights=bfloat16, or take a backbone of another family."
        )
    if weights == "fp8":
        return Fp8Settings(left)
    if weights == "int8" and anatomy.convolves(skeleton):
        raise BackboneError(
            f"model.weights=int8: linear layers of {type(skeleton).__name__} read maps of pictures, which bitsandbytes "
            "multiplies in 4 bits alone. Write model.weights=nf4, or model.weights=bfloat16."
        )
    kind = _WithExperts if weights != "int8" and any(_inside(skeleton)) else BitsAndBytesConfig
    return (kind if reader is None else partial(_Repacking, reader))(
        load_in_8bit=weights == "int8",
        load_in_4bit=weights != "int8",
        llm_int8_skip_modules=left,
        bnb_4bit_quant_type="nf4" if weights == "int8" else weights,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
    )


def _inside(model: PreTrainedModel) -> Iterator[Any]:
    """The modules of experts in the blocks."""
    experts = expert_layers.expert_layers(model)
    fused = {name.rpartition(".")[0] for name in anatomy.fused_experts(model)}
    return (module for name, module in experts.items() if name in fused)


class _WithExperts(BitsAndBytesConfig):
    """bitsandbytes' 4 bits of linear layers and experts, by a quantiser of ours."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)  # type: ignore[no-untyped-call]
        self.quant_method = _METHOD


_METHOD: Any = "bitsandbytes_4bit_with_experts"


@register_quantizer(_METHOD)
class _ExpertsQuantizer(Bnb4BitHfQuantizer):
    """Packs the experts of a module as soon as all of their files' tensors are read, as it does linear layers."""

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:  # type: ignore[override]
        super()._process_model_before_weight_loading(model, **kwargs)
        for experts in _inside(model):
            expert_layers.group(experts, format=self.quantization_config.bnb_4bit_quant_type)

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        module, name = get_module_from_name(model, param_name)
        if isinstance(module, expert_layers.GroupedExperts):
            return name in module.states or name in expert_layers.matrices(module)  # type: ignore[arg-type]
        return bool(super().param_needs_quantization(model, param_name, **kwargs))

    def get_quantize_ops(self) -> Any:
        return _Packing(self)  # type: ignore[no-untyped-call]

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        # To all others the model is one of bitsandbytes.
        self.quantization_config.quant_method = QuantizationMethod.BITS_AND_BYTES
        settled: PreTrainedModel = super()._process_model_after_weight_loading(model, **kwargs)
        return settled


class _Repacking(_WithExperts):
    """4 bits of weights that arrive in another format, which `reader` dequantises."""

    def __init__(self, reader: HfQuantizer, **settings: Any) -> None:
        super().__init__(**settings)
        self.quant_method, self.reader = _REPACKED, reader


_REPACKED: Any = "bitsandbytes_4bit_again"


@register_quantizer(_REPACKED)
class _RepackingQuantizer(_ExpertsQuantizer):
    """Packs each tensor as soon as it is dequantised."""

    quantization_config: _Repacking

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:  # type: ignore[override]
        self.quantization_config.reader._process_model_before_weight_loading(model, **kwargs)
        super()._process_model_before_weight_loading(model, **kwargs)
        self.pre_quantized = True  # so that transformers asks in which precision tensors are to be read

    def update_weight_conversions(self, weight_conversions: Any, model: PreTrainedModel) -> Any:
        return self.quantization_config.reader.update_weight_conversions(weight_conversions, model)

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        converter.quantization_operation = self.get_quantize_ops()
        read: torch.dtype | None = self.quantization_config.reader.get_new_dtype(converter, param, dtype)
        return read


class _Packing(Bnb4bitQuantize):
    """Packs one tensor, on the device that it was read to."""

    def convert(self, input_dict: Any, model: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        ((path, values),) = input_dict.items()
        if not self.hf_quantizer.param_needs_quantization(model, path):
            return input_dict
        module, name = get_module_from_name(model, path)
        value = values[0] if isinstance(values, list) else values
        value = value.dequantize() if is_quantised(value) else value
        if not isinstance(module, expert_layers.GroupedExperts):
            return super().convert({path: value}, model=model, **kwargs)
        return {path: expert_layers.pack(module, name, value, target=value.device, storage=torch.uint8)}


def is_quantised(tensor: Tensor) -> bool:
    """Whether a tensor is of a kind that knows how it is quantised, as torchao's do."""
    return type(tensor).dequantize is not Tensor.dequantize and hasattr(type(tensor), "tensor_data_names")


def replace(blueprint: PreTrainedModel, wanted: BitsAndBytesConfig | Fp8Settings) -> None:
    """Replace layers on the meta device, as `quantisation_settings` says, by those in FP8 or bitsandbytes' unpacked."""
    if isinstance(wanted, Fp8Settings):
        fp8_weights.replace(blueprint, wanted)
        return
    dtype = blueprint.dtype
    replace_with_bnb_linear(blueprint, wanted.llm_int8_skip_modules, wanted)
    for module in blueprint.modules():
        if isinstance(module, (nn.Linear, Conv1D)):
            module.requires_grad_(False)
            if module.bias is not None:
                module.bias.data = module.bias.to(dtype)  # which the new layers have in float32
            module.compress_statistics = wanted.bnb_4bit_use_double_quant
    if isinstance(wanted, _WithExperts):
        for experts in _inside(blueprint):
            expert_layers.group(experts, format=wanted.bnb_4bit_quant_type)
    for name in ("load_in_4bit", "load_in_8bit"):
        setattr(blueprint, f"is_{name.replace('load', 'loaded')}", getattr(wanted, name))  # what PEFT asks


def put_off(model: PreTrainedModel, weights: str, compute: torch.dtype) -> None:
    """Put bitsandbytes' 4-bit layers where `settings` quantises, with their weights as they are until `pack`.

    Packed they are of the precision that computes: processes that share a model cut tensors of one precision only.
    """
    wanted = quantisation_settings(weights, compute, model)
    assert isinstance(wanted, BitsAndBytesConfig), "weights in FP8 do not wait"
    wanted.bnb_4bit_quant_storage = compute
    left = unquantised(model)
    plain: dict[str, Any] = {name: model.get_submodule(name) for name in linear_layers(model) if name not in left}
    replace_with_bnb_linear(model, left, wanted)
    for name, layer in plain.items():
        packed: Any = model.get_submodule(name)
        if packed is layer:
            continue
        weight = layer.weight
        packed.bias = layer.bias
        packed.unpacked = weight.data.T if isinstance(layer, Conv1D) else weight.data
        packed.weight = _not_yet(packed.weight, packed.unpacked.shape)
        packed.forward = MethodType(_unpacked, packed)
    if isinstance(wanted, _WithExperts):
        for experts in _inside(model):
            expert_layers.group(experts, format=weights)
            experts.storage = compute
    model.is_loaded_in_4bit = True  # type: ignore[assignment]  # what PEFT asks before it takes its layers for these


def pack(layer: Any, target: torch.device) -> None:
    """Pack a layer on its device, if `put_off` left it unpacked."""
    if isinstance(unpacked := getattr(layer, "unpacked", None), Tensor):
        layer.weight = type(layer.weight)(
            unpacked,
            compress_statistics=True,
            quant_type=layer.weight.quant_type,
            quant_storage=layer.quant_storage,
            module=layer,
        ).to(target)
        del layer.unpacked, layer.forward
        settle(layer, layer.compute_dtype)
    elif isinstance(layer, expert_layers.GroupedExperts) and layer.format is not None:
        experts: Any = layer
        for name, weight in expert_layers.matrices(experts).items():
            experts._parameters[name] = expert_layers.pack(
                experts, name, weight.data, target=target, storage=experts.storage
            )
        settle(experts, experts.storage)


def stand_in(layer: Any, target: torch.device) -> None:
    """Put zeros on a device in place of what a layer that waits would read, until another process sends its values."""
    waits = isinstance(unpacked := getattr(layer, "unpacked", None), Tensor)
    if isinstance(unpacked, Tensor):
        layer.unpacked = torch.zeros(unpacked.shape, dtype=unpacked.dtype, device=target)
    for name, tensor in (*layer._parameters.items(), *layer._buffers.items()):
        if tensor is not None and not (waits and name == "weight"):  # which takes no memory yet
            tensor.data = torch.zeros(tensor.shape, dtype=tensor.dtype, device=target)


def let_go(layer: Any) -> None:
    """Drop the unpacked weight of a layer that this process will not compute."""
    if hasattr(layer, "unpacked"):
        del layer.unpacked, layer.forward


def untranspose(skeleton: PreTrainedModel) -> None:
    """Replace GPT-2's Conv1D layers by linear ones where they will be quantised, as bitsandbytes does."""
    left = unquantised(skeleton)
    for name in linear_layers(skeleton):
        layer = skeleton.get_submodule(name)
        if type(layer) is Conv1D and name not in left:
            weight = layer.weight
            skeleton.set_submodule(name, nn.Linear(layer.nx, layer.nf, device=weight.device, dtype=weight.dtype))


def linear_layers(model: nn.Module) -> list[str]:
    """Paths of all linear layers."""
    return [name for name, module in model.named_modules() if anatomy.is_linear(module)]


def unquantised(model: PreTrainedModel) -> list[str]:
    """Paths of the linear layers that keep their precision: those outside the blocks, gates, those whose weight is read
    past the layer, and those a family names.

    T5 names its feed-forward output; transformers never quantises these.
    """
    values = model.config.get_text_config().to_dict()
    experts = {
        value for key, value in values.items() if "experts" in key and "per_tok" not in key and type(value) is int
    }
    named = [*(model._keep_in_fp32_modules or ())]
    inside = {name for name in anatomy.linear_modules(model) if should_convert_module(name, named)}
    plain = {name for name in inside if _is_gate(model.get_submodule(name), experts) or only_read(model, name)}
    return [name for name in linear_layers(model) if name not in inside or name in plain]


def settle(model: nn.Module, compute: torch.dtype) -> None:
    """Make 4-bit layers compute the same in training and evaluation, on every CPU.

    On a CPU with AVX512-bf16, bitsandbytes repacks a 4-bit layer at its first evaluation and rounds its scales; a
    layer that was repacked has no gradient in later training, and refuses sizes that are no multiples of 32.
    """
    from bitsandbytes.nn.modules import Linear4bit  # a second to import, and most runs need none of it

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False
            packed: Any = module.weight
            packed.quant_state.dtype = compute  # what the backward pass, and a merge, dequantise to
        elif isinstance(module, expert_layers.GroupedExperts):
            for state in module.states.values():
                state.dtype = compute


def notes(model: nn.Module, weights: str) -> list[str]:
    """A warning where less than half of the parameters are stored in `weights`, and where products are emulated."""
    from bitsandbytes.nn.modules import Linear4bit, Linear8bitLt

    layers = [module for module in model.modules() if isinstance(module, (Linear4bit, Linear8bitLt, Fp8Linear))]
    packed = {id(layer.weight) for layer in layers}
    quantised = sum(layer.in_features * layer.out_features for layer in layers)
    for experts in expert_layers.packed_experts(model):
        packed |= {id(experts._parameters[name]) for name in experts.states}
        quantised += sum(state.shape.numel() for state in experts.states.values())
    rest = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in packed)
    share = quantised / (quantised + rest)
    fused = any(id(each) not in packed for each in anatomy.fused_experts(model).values())
    beside = ", and experts in one fused tensor," if fused else ""
    rest_note = f"embeddings{beside} are not quantised"
    found = [] if share >= 0.5 else [f"{share:.0%} of the parameters are in {weights}; {rest_note}"]
    eight = next((layer for layer in layers if isinstance(layer, Fp8Linear)), None)
    if eight is not None and not fp8_layers.multiplies(eight.weight.device):
        found.append(
            "this device multiplies no FP8 numbers (NVIDIA's do from compute capability 8.9 on): weights take the "
            "memory of FP8, and its products are emulated, slower than bfloat16's"
        )
    return found


def _not_yet(weight: Any, shape: torch.Size) -> nn.Parameter:
    """A placeholder for a packed weight: of its size, without memory."""
    from bitsandbytes.functional import QuantState

    known: Any = QuantState  # it has no types

    def fake(size: int) -> Tensor:
        return torch.empty(1, dtype=torch.uint8).expand(size)

    state = known(absmax=fake(shape.numel() // 64), shape=shape, quant_type=weight.quant_type)
    placeholder: nn.Parameter = type(weight)(
        fake(shape.numel() // 2)[:, None], quant_state=state, quant_type=weight.quant_type
    )
    return placeholder


def _unpacked(layer: Any, x: Tensor) -> Tensor:
    """Output of a layer whose weight is not packed yet, as it will be then."""
    product: Tensor = _WaitingProduct.apply(x.flatten(0, -2), layer)  # type: ignore[no-untyped-call]
    output = product.view(*x.shape[:-1], product.shape[-1])
    return output if layer.bias is None else output + layer.bias.to(x.dtype)


class _WaitingProduct(torch.autograd.Function):
    """Input (N, I) times the weight that a layer will have; it is computed twice, for no dense copy to be kept."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, layer: Any) -> Tensor:
        ctx.layer = layer
        return F.linear(input, anatomy.dense_weight(layer).to(input.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ anatomy.dense_weight(ctx.layer).to(grad.dtype), None


def _is_gate(module: Any, experts: set[int]) -> bool:
    """Whether a layer outputs a few weights instead of hidden values, such as the router of a mixture of experts."""
    outputs, inputs = module.weight.shape if isinstance(module, nn.Linear) else module.weight.T.shape
    return outputs in experts or (outputs < GATE and inputs >= 16 * outputs)
