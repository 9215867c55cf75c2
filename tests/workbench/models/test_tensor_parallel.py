"""Parts of a model in threads that add up as processes do, against the whole model, in float64."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from workbench import adapters
from workbench.adapters import Lora
from workbench.models import fused_lora, tensor_parallel
from workbench.models.tensor_parallel import Shares, TensorGroup
from workbench.training.distributed import tensor

T = TypeVar("T")
SIZES = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "head_dim": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
CONFIGS: dict[str, type[PretrainedConfig]] = {
    "gemma": GemmaConfig,
    "granite": GraniteConfig,
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}


class Exchange:
    """Tensors that threads give each other."""

    def __init__(self, size: int) -> None:
        self._given: list[Tensor] = [torch.empty(0)] * size
        self._barrier = threading.Barrier(size, timeout=20)

    def all(self, number: int, given: Tensor) -> list[Tensor]:
        self._given[number] = given.detach().clone()
        self._barrier.wait()
        everything = list(self._given)
        self._barrier.wait()
        return everything


class ThreadGroup(TensorGroup):
    """Parts in threads of one process."""

    def __init__(self, number: int, size: int, exchange: Exchange) -> None:
        super().__init__(number, size)
        object.__setattr__(self, "exchange", exchange)

    def summed(self, addend: Tensor) -> Tensor:
        return torch.stack(self.exchange.all(self.number, addend)).sum(0)  # type: ignore[attr-defined]


def in_threads(work: Callable[[TensorGroup], T], *, size: int = 2) -> list[T]:
    exchange = Exchange(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, [ThreadGroup(number, size, exchange) for number in range(size)]))


def family(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIGS[name](**SIZES, **HEADS)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="sdpa")
    for parameter in model.parameters():  # norms and biases of their own
        parameter.data = parameter.data + 0.1 * torch.randn_like(parameter)
    return model


def with_lora(model: PreTrainedModel) -> nn.Module:
    """LoRA on every linear layer of the blocks, away from its start."""
    adapted = adapters.attach(model.requires_grad_(False), Lora(rank=3), seed=0)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = 0.3 * torch.randn(parameter.shape, dtype=torch.float64)
    fused_lora.fuse(adapted)
    return adapted


class Outcome:
    """Logits and gradients of a model."""

    def __init__(self, model: Any, shares: Shares) -> None:
        ids_BL = torch.arange(14).reshape(2, 7) % 11
        self.logits = model(input_ids=ids_BL).logits
        self.logits.backward(torch.linspace(-1, 1, self.logits.numel()).double().view_as(self.logits))
        self.gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        self.shares = shares


def whole(name: str, parts: Sequence[Outcome]) -> Tensor:
    """The gradient of a parameter, from those of all parts."""
    gradients, shares = [each.gradients[name] for each in parts], parts[0].shares
    if name not in shares:
        assert all(torch.equal(each, gradients[0]) for each in gradients)
        return gradients[0]
    dimension = shares[name]
    return torch.stack(gradients).sum(0) if dimension is None else torch.cat(gradients, dimension)


def require_whole(model: nn.Module) -> None:
    """The parts of a model give the logits and the gradients of the whole one."""
    wanted = Outcome(copy.deepcopy(model), {})

    def part(group: TensorGroup) -> Outcome:
        own = copy.deepcopy(model)
        return Outcome(own, tensor.cut(own, group))

    parts = in_threads(part)
    for each in parts:
        torch.testing.assert_close(each.logits, wanted.logits, rtol=1e-12, atol=1e-12)
    assert parts[0].gradients.keys() == wanted.gradients.keys()
    for name, gradient in wanted.gradients.items():
        torch.testing.assert_close(whole(name, parts), gradient, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", tensor_parallel.FAMILIES)
def test_parts_are_the_whole_model(name: str) -> None:
    require_whole(family(name))


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_parts_of_lora_are_the_whole_adapter(name: str) -> None:
    require_whole(with_lora(family(name)))


def test_a_part_is_a_part() -> None:
    """Half of each matrix of the blocks, and all of the rest."""
    model = family("llama")
    sizes = {name: each.numel() for name, each in model.named_parameters()}
    shares = tensor.cut(model, TensorGroup(1, 2))
    assert set(shares.values()) == {0, 1} and len(shares) == 2 * 7
    for name, each in model.named_parameters():
        assert each.numel() * (2 if name in shares else 1) == sizes[name]


def test_parts_joined_are_the_whole() -> None:
    matrix = torch.arange(24.0).reshape(4, 6)
    for dimension in (0, 1):
        parts = [TensorGroup(number, 2).part(matrix, dimension) for number in range(2)]
        assert torch.equal(torch.cat(parts, dimension), matrix)
        assert torch.equal(TensorGroup().joined(matrix.T, dimension), matrix.T)


def test_entering_adds_up_gradients_and_leaving_adds_up_outputs() -> None:
    """The two are each other's transposes, written out: x_1 = x_2 = x, and y = y_1 + y_2."""

    def through(group: TensorGroup) -> tuple[Tensor, Tensor]:
        hidden = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
        factor = 3.0 + group.number
        output = tensor_parallel.leave(factor * tensor_parallel.enter(hidden, group), group)
        (output * torch.tensor([1.0, 10.0])).sum().backward()
        assert hidden.grad is not None
        return output.detach(), hidden.grad

    for output, gradient in in_threads(through):
        assert output.tolist() == [7.0, 14.0]
        assert gradient.tolist() == [7.0, 70.0]


def test_a_group_of_one_changes_no_bit() -> None:
    model = with_lora(family("llama"))
    wanted, cut = Outcome(copy.deepcopy(model), {}), copy.deepcopy(model)
    found = Outcome(cut, tensor.cut(cut, TensorGroup()))
    assert torch.equal(found.logits, wanted.logits)
    assert all(torch.equal(found.gradients[name], gradient) for name, gradient in wanted.gradients.items())


@pytest.mark.parametrize("function", [tensor_parallel.enter, tensor_parallel.leave])
def test_one_process_alone_changes_nothing(function: Callable[[Tensor, TensorGroup], Tensor]) -> None:
    values = torch.randn(3, dtype=torch.float64, requires_grad=True)
    assert torch.equal(function(values, TensorGroup()), values)
    assert torch.autograd.gradcheck(lambda each: function(each, TensorGroup()), values)
