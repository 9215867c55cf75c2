"""Packed weights without values: they stay packed wherever a module takes them."""

from __future__ import annotations

import copy

import pytest
import torch
from bitsandbytes.nn.modules import Linear4bit, Linear8bitLt

from workbench.planning.fake_tensors import fake_tensors, pack, to_fake


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
