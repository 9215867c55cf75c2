"""Experts of a mixture whose matrices stand in one parameter: packed in 4 bits, and with LoRA on each.

Tokens are sorted by expert, so that one grouped product does the work of all experts. The packed matrices of a block
are dequantised for the forward and again for the backward pass; an update B A is two more grouped products, and is
never added up for all experts.

Legend: N tokens, K experts of a token, S = N K pairs of token and expert, E experts, I inputs, O outputs, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from functools import cache
from typing import Any, NamedTuple

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations.moe import _grouped_linear

from workbench.adapters.precision.peft_layers import computing

_linear: Callable[..., Tensor] = _grouped_linear
"""Product of rows (S, I), sorted by expert, with matrices (E, O, I), or (E, I, O) where these are transposed."""


def expert_layers(model: nn.Module) -> dict[str, Any]:
    """The modules that transformers lets compute their experts in several ways, by path."""
    marks = {"has_gate", "has_bias", "is_transposed"}  # what transformers sets on them, and reads
    return {name: module for name, module in model.named_modules() if marks <= vars(module).keys()}


def matrices(experts: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a module of experts that hold a matrix of each, by name."""
    return {name: each for name, each in experts._parameters.items() if each is not None and each.ndim == 3}


def pack(experts: Any, name: str, weight_EOI: Tensor, *, target: torch.device, storage: torch.dtype) -> nn.Parameter:
    """A parameter of experts that compute by grouped products, packed on a device in their format.

    The scales are quantised, too. `storage`: precision that the packed numbers claim to have.
    """
    from bitsandbytes.nn.modules import Params4bit  # a second to import, and most runs need none of it

    weight: Any = Params4bit(weight_EOI, requires_grad=False, quant_type=experts.format, quant_storage=storage)
    return keep(experts, name, weight.to(target), weight_EOI.shape)


def keep(experts: Any, name: str, packed: Any, whole: torch.Size) -> nn.Parameter:
    """Note how a parameter was packed, and tell PEFT its shape, by the name by which parts of DeepSpeed's tell it."""
    experts.states[name], packed.ds_shape = packed.quant_state, whole
    parameter: nn.Parameter = packed
    return parameter


def unpack(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace packed matrices of experts by what they multiply with, in `dtype`."""
    for experts in packed_experts(model):
        for name in list(experts.states):
            experts._parameters[name] = nn.Parameter(experts.matrix(name, dtype), requires_grad=False)
            del experts.states[name]


def packed_experts(model: nn.Module) -> Iterator[Any]:
    """The modules of experts that are packed, or are to be."""
    for module in model.modules():
        if isinstance(module, GroupedExperts) and module.format is not None:
            yield module


class ExpertUpdate(NamedTuple):
    """What LoRA adds to the product with one parameter."""

    A_ERI: Tensor
    B_EOR: Tensor
    scale: float


class GroupedExperts:
    """Mixed into transformers' experts: grouped products over packed or plain matrices, with LoRA's updates.

    Over plain matrices and without updates it is transformers' `grouped_mm`, bit for bit.
    """

    updates: dict[str, list[ExpertUpdate]]
    """By parameter, while a forward pass runs."""
    states: dict[str, Any]
    """How the parameters that are packed were packed; one that processes share loses it whenever it is gathered."""
    format: str | None
    """nf4 or fp4; None: they are not packed, and will not be."""

    def forward(self, hidden_ND: Tensor, expert_NK: Tensor, weight_NK: Tensor) -> Tensor:
        layer: Any = self
        count = expert_NK.shape[1]
        expert_S, order_S = torch.sort(expert_NK.flatten())
        known_E = torch.arange(layer.num_experts, device=expert_S.device, dtype=expert_S.dtype)
        ends_E = torch.searchsorted(expert_S, known_E, right=True, out_int32=True)
        inner = self._product(hidden_ND[order_S // count], "gate_up_proj" if layer.has_gate else "up_proj", ends_E)
        inner = self._with_bias(inner, "gate_up_proj_bias" if layer.has_gate else "up_proj_bias", expert_S)
        inner = layer._apply_gate(inner) if layer.has_gate else layer.act_fn(inner)
        outer_SD = self._with_bias(self._product(inner, "down_proj", ends_E), "down_proj_bias", expert_S)
        if layer.has_post_expert_norm:
            outer_SD = layer.post_expert_norm(outer_SD)
        outer_SD = outer_SD * weight_NK.flatten()[order_S][:, None]
        back_S = torch.empty_like(order_S)
        back_S[order_S] = torch.arange(len(order_S), device=order_S.device)
        return outer_SD[back_S].view(len(hidden_ND), count, -1).sum(1).to(hidden_ND.dtype)

    def matrix(self, name: str, dtype: torch.dtype) -> Tensor:
        """The matrices (E, O, I) of a packed parameter, in a new tensor of `dtype`."""
        from bitsandbytes.functional import dequantize_4bit

        layer: Any = self
        state = copy(self.states[name])
        # In one row: on a CPU, bitsandbytes 0.50 takes a scale for 64 numbers of each row anew, as if rows were whole.
        whole, state.shape = state.shape, torch.Size((1, state.shape.numel()))
        flat: Tensor = dequantize_4bit(layer._parameters[name].data, state)
        return flat.view(whole).to(dtype)

    def _product(self, rows_SI: Tensor, name: str, ends_E: Tensor) -> Tensor:
        layer: Any = self
        if name in self.states:
            product: Tensor = _PackedProduct.apply(rows_SI, ends_E, self, name)  # type: ignore[no-untyped-call]
        else:
            product = _linear(rows_SI, getattr(layer, name), ends_E, is_transposed=layer.is_transposed)
        for A_ERI, B_EOR, scale in self.updates.get(name, ()):
            inner_SR = _linear(rows_SI, _whole_words(A_ERI.to(rows_SI.dtype), 1), ends_E)
            update = _linear(inner_SR, _whole_words(B_EOR.to(rows_SI.dtype), 2), ends_E)
            product = product + scale * update
        return product

    def _with_bias(self, rows_SO: Tensor, name: str, expert_S: Tensor) -> Tensor:
        layer: Any = self
        return rows_SO + getattr(layer, name)[expert_S] if layer.has_bias else rows_SO


class _PackedProduct(torch.autograd.Function):
    """The product of sorted rows with packed matrices, of which nothing dequantised is kept."""

    @staticmethod
    def forward(ctx: Any, rows_SI: Tensor, ends_E: Tensor, layer: Any, name: str) -> Tensor:
        ctx.save_for_backward(ends_E)
        ctx.layer, ctx.name = layer, name
        return _linear(rows_SI, layer.matrix(name, rows_SI.dtype), ends_E, is_transposed=layer.is_transposed)

    @staticmethod
    def backward(ctx: Any, grad_SO: Tensor) -> tuple[Tensor | None, ...]:
        layer, (ends_E,) = ctx.layer, ctx.saved_tensors
        matrix = layer.matrix(ctx.name, grad_SO.dtype)
        rows_grad = _linear(grad_SO.contiguous(), matrix, ends_E, is_transposed=not layer.is_transposed)
        return rows_grad, None, None, None


def _whole_words(weight: Tensor, dim: int) -> Tensor:
    """A weight whose ranks, at `dim`, fill whole words of 16 bytes with zeros, as grouped products ask on a GPU."""
    short = -weight.shape[dim] % (16 // weight.element_size())
    padded = F.pad(weight, (0, short) if dim == 2 else (0, 0, 0, short)) if short else weight
    return padded.contiguous()


class GroupedLora(ParamWrapper):
    """PEFT's LoRA of experts, which adds to the products with its parameter instead of to the parameter."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        experts = self.get_base_layer()
        names = computing(self)
        if not names or not isinstance(experts, GroupedExperts):
            plain: Tensor = super().forward(x, *args, **kwargs)
            return plain
        experts.updates[self.parameter_name] = list(self._updates(names))
        try:
            result: Tensor = self.base_layer(x, *args, **kwargs)
        finally:
            del experts.updates[self.parameter_name]
        return result

    def _updates(self, names: list[str]) -> Iterator[ExpertUpdate]:
        layers: Any = self.lora_A, self.lora_B
        for name in names:
            A, B = (each[name].weight for each in layers)  # rows by expert, columns by rank
            A_ERI = A.view(self.num_experts, -1, A.shape[1])
            yield ExpertUpdate(A_ERI, B.view(len(B), -1, self.num_experts).permute(2, 0, 1), self.scaling[name])


def group(experts: Any, *, format: str | None = None) -> None:
    """Let a module of experts compute by grouped products, over matrices that are to be packed in a format."""
    if not isinstance(experts, GroupedExperts):
        kind: Any = type(experts)
        experts.__class__ = _kind(kind)
        experts.updates, experts.states, experts.format = {}, {}, format


@cache
def _kind(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Grouped{kind.__name__}", (GroupedExperts, kind), {})


def group_updates(model: nn.Module) -> None:
    """Let PEFT's LoRA of experts add to their grouped products, where transformers lets them compute so."""
    known = {id(each) for each in expert_layers(model).values()}
    for module in model.modules():
        if type(module) is ParamWrapper and id(experts := module.get_base_layer()) in known:
            group(experts)
            module.__class__ = GroupedLora
