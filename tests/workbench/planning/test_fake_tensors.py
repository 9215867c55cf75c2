"""Imagined tensors have everything but numbers, and real ones beside them stay real.

What is recalled of an operation is what torch would imagine again.
Packed weights without values: they stay packed wherever a module takes them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from copy import deepcopy
from typing import Any, TypeVar

import pytest
import torch
from bitsandbytes.nn.modules import Linear4bit, Linear8bitLt
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.conftest import FAMILIES, tiny
from workbench.planning.counters import LiveBytes
from workbench.planning.fake_tensors import fake_tensors, pack, real_tensors, to_fake

CPU = torch.device("cpu")
ModelT = TypeVar("ModelT", bound=nn.Module)


def _imagined(build: Callable[[], ModelT]) -> ModelT:
    """A model that was never made."""
    with real_tensors(), torch.device("meta"):
        model = build()
    to_fake(model, CPU)
    return model


def test_a_product_with_an_imagined_matrix_is_imagined() -> None:
    with fake_tensors():
        layer = _imagined(lambda: nn.Linear(3, 4))
        output = layer(torch.ones(2, 3))
        assert isinstance(output, FakeTensor) and output.shape == (2, 4) and output.device == CPU
        assert float(output.detach().sum()) == 1.0 and bool((output > 0).any())


def test_what_is_computed_from_real_tensors_alone_is_real() -> None:
    mask_BL = torch.tensor([[1, 1, 0], [1, 1, 1]])
    with fake_tensors():
        layer = _imagined(lambda: nn.Linear(3, 4))
        assert not bool((mask_BL == 1).all()) and (mask_BL == 1).sum(-1).tolist() == [2, 3]
        layer(mask_BL.float())
    assert mask_BL.sum() == 5


def test_outside_of_it_and_in_between_everything_is_real() -> None:
    with fake_tensors():
        assert isinstance(torch.ones(3), FakeTensor)
        with real_tensors():
            assert torch.ones(3).tolist() == [1, 1, 1]
    assert torch.ones(3).tolist() == [1, 1, 1]


def test_tied_weights_stay_tied() -> None:
    config = tiny("Llama", tie_word_embeddings=True).config
    with fake_tensors():
        model = _imagined(lambda: AutoModelForCausalLM.from_config(config))
        assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_family_computes_the_same_shapes_and_kernels(name: str) -> None:
    """The operations are those of the real model, in their order: no family takes another way without numbers."""
    ids_BL = torch.arange(12).view(2, 6)
    real = tiny(name)
    with fake_tensors():
        other = _imagined(lambda: _shapes(name))
        with _Kernels() as imagined_kernels:
            fake = other(input_ids=ids_BL, use_cache=False).logits
    with _Kernels() as kernels:
        wanted = real(input_ids=ids_BL, use_cache=False).logits
    assert fake.shape == wanted.shape and fake.dtype == wanted.dtype
    assert imagined_kernels.products == kernels.products


def _shapes(name: str) -> PreTrainedModel:
    """What `tiny` gives, without its numbers."""
    model = AutoModelForCausalLM.from_config(tiny(name).config)
    assert isinstance(model, PreTrainedModel)
    return model.eval()


class _Kernels(torch.utils._python_dispatch.TorchDispatchMode):
    """Remembers the matrix products and attention kernels that run."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if any(word in str(func) for word in ("mm", "attention", "softmax")):
            self.products.append(str(func))
        return func(*args, **(kwargs or {}))


def test_what_is_computed_for_real_is_counted_from_outside_too() -> None:
    with LiveBytes() as outer, fake_tensors():
        positions = torch.arange(1000)
        with LiveBytes() as inner:
            doubled = positions * 2
    assert inner.now == doubled.nbytes
    assert outer.now == positions.nbytes + doubled.nbytes


def test_values_copied_into_another_precision_take_no_memory() -> None:
    with fake_tensors():
        wide = _imagined(lambda: nn.Linear(3, 4)).weight.detach()
        half = wide.bfloat16()
        with LiveBytes() as live:
            assert wide.copy_(half).untyped_storage()._cdata == wide.untyped_storage()._cdata
            assert half.copy_(wide) is half
        assert live.peak == 0


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "product": lambda x, y: x @ y,
    "sum with a whole number": lambda x, y: x.int() + 1,
    "sum with a fraction": lambda x, y: x.int() + 1.0,
    "view": lambda x, y: x.view(2, 20).T[:, 1:],
    "several views": lambda x, y: x.split(2),
    "several results": lambda x, y: torch.max(x, dim=0),
    "precision": lambda x, y: (x.bfloat16() * y.T.half()[:, :1].bfloat16()).float(),
    "one of many": lambda x, y: torch.cat([x, x, y.T]),
    "in place": lambda x, y: x.add_(1).mul_(x),
    "another shape in place": lambda x, y: x.clone().t_(),
    "no copy": lambda x, y: x.contiguous(),
    "made of nothing": lambda x, y: torch.zeros(4, 10),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_same_again(name: str) -> None:
    operation = OPERATIONS[name]
    with FakeTensorMode():
        wanted = _described(operation)
    with fake_tensors():
        assert [_described(operation) for _ in range(3)] == [wanted] * 3


def _described(operation: Callable[[Tensor, Tensor], Any]) -> list[Any]:
    x, y = torch.empty(4, 10), torch.empty(10, 4)
    result = operation(x, y)
    tensors = [result] if isinstance(result, Tensor) else list(result)
    assert all(isinstance(each, FakeTensor) for each in tensors)
    storages = [each.untyped_storage()._cdata for each in (x, y, *tensors)]
    return [
        [(each.shape, each.stride(), each.storage_offset(), each.dtype, each.device) for each in tensors],
        [storages.index(each) for each in storages],
        [each is x for each in tensors],
        x.shape,
    ]


def test_what_is_made_of_nothing_has_the_precision_of_the_moment() -> None:
    with fake_tensors():
        made = [torch.zeros(3).dtype]
        torch.set_default_dtype(torch.bfloat16)
        try:
            made += [torch.zeros(3).dtype, (torch.empty(2, dtype=torch.int64) * 0.5).dtype]
        finally:
            torch.set_default_dtype(torch.float32)
        made += [torch.zeros(3).dtype, (torch.empty(2, dtype=torch.int64) * 0.5).dtype]
    assert made == [torch.float32, torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]


def test_what_is_made_while_tensors_are_real_is_real() -> None:
    with fake_tensors():
        before = torch.zeros(3)
        with real_tensors():
            within = torch.zeros(3)
            assert not isinstance(within, FakeTensor) and within.tolist() == [0, 0, 0]
        after = torch.zeros(3)
    assert isinstance(before, FakeTensor) and isinstance(after, FakeTensor)


def test_modules_are_copied() -> None:
    with fake_tensors():
        for _ in range(2):
            assert deepcopy(nn.LayerNorm(5)).weight.shape == (5,)


def test_gradients_are_those_of_the_first_time() -> None:
    found = []
    with fake_tensors():
        for _ in range(2):
            weight = torch.empty(5, 3, requires_grad=True)
            (torch.empty(7, 5) @ weight).relu().sum().backward()
            assert weight.grad is not None
            found.append((weight.grad.shape, weight.grad.stride(), weight.grad.dtype))
    assert found[0] == found[1] == (weight.shape, weight.stride(), weight.dtype)


@pytest.mark.parametrize("weights", ["int8", "nf4"])
def test_the_layers_of_a_model_that_is_timed_have_weights_that_compute(weights: str) -> None:
    layer = (
        Linear8bitLt(64, 8, bias=False, has_fp16_weights=False) if weights == "int8" else Linear4bit(64, 8, bias=False)
    )
    pack(layer, weights, torch.bfloat16)
    for each in (layer, copy.deepcopy(layer), layer.to(torch.device("cpu"))):
        assert not each(torch.ones(2, 64, dtype=torch.bfloat16)).any()  # all are zeros
        assert each.weight.dtype == {"int8": torch.int8, "nf4": torch.uint8}[weights]


def test_an_8_bit_layer_that_is_moved_and_copied_still_computes() -> None:
    """PEFT moves the layers that IA3, OFT and VeRA wrap."""
    with torch.device("meta"):
        layer = Linear8bitLt(16, 8, bias=False, has_fp16_weights=False)
    with fake_tensors():
        to_fake(layer, torch.device("cpu"))
        pack(layer, "int8", torch.bfloat16)
        storage = layer.weight.untyped_storage()
        moved = layer.to(torch.device("cpu"))
        for each in (moved.weight, moved.weight.CB):
            assert each.untyped_storage()._cdata == storage._cdata  # which a ledger counts once
        for whole in (copy.deepcopy(moved), moved):
            for _ in range(2):  # the first forward pass hands its weight to the state of the layer
                assert whole(torch.ones(2, 16, dtype=torch.bfloat16)).shape == (2, 8)
                whole.to(torch.device("cpu"))
        assert moved.weight.to(torch.float32).dtype == torch.float32
