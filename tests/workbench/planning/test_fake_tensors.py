"""Imagined tensors have everything but numbers, and real ones beside them stay real."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.conftest import FAMILIES, tiny
from workbench.planning.counters import LiveBytes
from workbench.planning.fake_tensors import fake_tensors, real_tensors, to_fake

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
