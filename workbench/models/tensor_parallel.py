"""Blocks of which each of several processes computes a part of the heads and of the MLP's features, for the same rows.

Layers that read hidden states are cut by their outputs, those that write them by their inputs, so that the outputs of
the latter are addends of the whole ones. Each attention and each MLP adds up once in a pass: its outputs in the forward
pass, the gradient of its inputs in the backward pass. Which layer is cut how is said by transformers
(`base_model_tp_plan`). Shoeybi et al. 2019 (Megatron-LM), arXiv:1909.08053, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from transformers import PretrainedConfig

from workbench.adapters import anatomy

FAMILIES = ("gemma", "granite", "llama", "mistral", "qwen2", "qwen3")
"""Architectures by transformers' `model_type` of which tests show that their parts are the whole."""
OUTPUTS, INPUTS, INSIDE = "colwise", "rowwise", "replicated_with_grad_allreduce"
"""How transformers cuts a layer: by its outputs, by its inputs, or not, where it computes a part of the heads."""
_PREFIX = "layers.*."

Shares = Mapping[str, int | None]
"""By the names of parameters: the dimension that is cut; None where a parameter is whole, and a process computes an
addend of its gradient. Others are whole, and their gradients too."""


@dataclass(frozen=True)
class TensorGroup:
    """The processes that hold the parts of the same blocks."""

    number: int = 0
    """Which part is this process's, from 0."""
    size: int = 1
    """How many there are."""
    processes: dist.ProcessGroup | None = None
    """None: in a plan, where nothing is sent."""

    def summed(self, addend: Tensor) -> Tensor:
        """The sum of what all processes give, the same bits in each of them."""
        if self.processes is None:
            return addend.clone()
        total: Tensor = collectives.wait_tensor(collectives.all_reduce(addend, "sum", self.processes))
        return total

    def joined(self, part: Tensor, dimension: int) -> Tensor:
        """The whole of which each process gives its part."""
        part = part.contiguous()
        parts = [part] * self.size
        if self.processes is not None:
            parts = [torch.empty_like(part) for _ in parts]
            dist.all_gather(parts, part, self.processes)
        return torch.cat(parts, dimension)

    def part(self, whole: Tensor, dimension: int) -> Tensor:
        """This process's part, a copy."""
        length = whole.shape[dimension] // self.size
        return whole.narrow(dimension, self.number * length, length).clone(memory_format=torch.contiguous_format)


def enter(hidden: Tensor, group: TensorGroup) -> Tensor:
    """Hidden states as they are; their gradient is the sum of those of all processes."""
    entered: Tensor = _Enter.apply(hidden, group)  # type: ignore[no-untyped-call]
    return entered


def leave(addend: Tensor, group: TensorGroup) -> Tensor:
    """The sum of what all processes give; its gradient is that of each addend."""
    left: Tensor = _Leave.apply(addend, group)  # type: ignore[no-untyped-call]
    return left


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.summed(grad), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, addend: Tensor, group: TensorGroup) -> Tensor:
        return group.summed(addend)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _CutLayer(NamedTuple):
    """A layer of a block that computes a part."""

    name: str
    module: nn.Module
    parent: nn.Module
    """The attention or MLP that it belongs to."""
    way: str


def plan(config: PretrainedConfig) -> dict[str, str]:
    """How each layer of a block is cut, by its path in the block."""
    body: Any = config.get_text_config(decoder=True)
    return {path.removeprefix(_PREFIX): way for path, way in (body.base_model_tp_plan or {}).items()}


def _layers(model: Any) -> Iterator[_CutLayer]:
    blocks, ways = set(anatomy.decoder_layers(model)), plan(model.config)
    for name, block in model.named_modules():
        for path, way in ways.items() if block in blocks else ():
            parent = block.get_submodule(path.rpartition(".")[0])
            yield _CutLayer(f"{name}.{path}", block.get_submodule(path), parent, way)


def shares(model: nn.Module) -> Shares:
    """How the parameters of a model are cut, those of LoRA with the layers that they belong to.

    Of B A over a layer that is cut by its outputs, B is cut as they are; by its inputs, A is, and B adds up with them.
    """
    return {
        f"{layer.name}.{name}": _dimension(layer.way, name)
        for layer in _layers(model)
        for name, _ in layer.module.named_parameters()
    }


def _dimension(way: str, parameter: str) -> int | None:
    if way == INSIDE:
        return None
    dimension, whole = {OUTPUTS: (0, "lora_A."), INPUTS: (1, "lora_B.")}[way]
    return None if whole in parameter else dimension


def connect(model: nn.Module, group: TensorGroup) -> None:
    """Let the attention and the MLP of each block add up what the processes of a group compute."""

    def entering(
        _: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if inputs:
            return (enter(inputs[0], group), *inputs[1:]), named
        return inputs, {**named, "hidden_states": enter(named["hidden_states"], group)}

    def leaving(_: nn.Module, __: tuple[Any, ...], addend: Tensor) -> Tensor:
        return leave(addend, group)

    layers = list(_layers(model))
    for parent in {layer.parent for layer in layers}:
        parent.register_forward_pre_hook(entering, with_kwargs=True)
    for layer in layers:
        if layer.way == INPUTS:
            layer.module.register_forward_hook(leaving)
