"""Dequantised weights are bit for bit those that bitsandbytes multiplies with; members of a bank share the latest."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from bitsandbytes import MatmulLtState, matmul, matmul_4bit
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from torch import Tensor, nn

from tests.adapters.banks.test_bank_methods import disturbed, ids, method, routed
from workbench.adapters.banks import bank
from workbench.adapters.precision import quantised_weights
from workbench.adapters.precision.quantised_weights import LatestWeight, dequantised, is_quantised, share_latest
from workbench.config import ModelConfig
from workbench.models import backbones

SHAPES = ((96, 64), (7, 33), (1, 200), (130, 1), (300, 1024))
"""Outputs and inputs: odd ones, blocks of 64 that end within a row, one row, and several chunks of 8-bit rows."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def weights(outputs: int, inputs: int) -> Tensor:
    """Of very different sizes, with a row of zeros and outliers."""
    drawn = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))
    drawn *= torch.logspace(-4, 1, outputs)[:, None]
    drawn[0] = 0
    drawn[-1, -1] = 60
    return drawn.bfloat16()


def packed(kind: str, weight: Tensor, compute: torch.dtype, *, nested: bool = True) -> nn.Module:
    outputs, inputs = weight.shape
    layer: nn.Module
    if kind == "int8":
        layer = Linear8bitLt(inputs, outputs, bias=False, has_fp16_weights=False)
    else:
        layer = Linear4bit(inputs, outputs, bias=False, compute_dtype=compute, quant_type=kind)
        layer.weight.compress_statistics = nested
    layer.weight.data = weight.to(compute)
    layer.to("cpu")
    if kind != "int8":
        layer.weight.quant_state.dtype = compute  # as `quantisation.settle` does
    return layer.train()


@pytest.mark.nightly(but="each value once")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("kind", "nested"), [("nf4", True), ("nf4", False), ("fp4", True), ("fp4", False)])
def test_four_bits(kind: str, nested: bool, shape: tuple[int, int], dtype: torch.dtype) -> None:
    layer = packed(kind, weights(*shape), dtype, nested=nested)
    assert layer.weight.quant_state.nested == nested and is_quantised(layer)
    found = dequantised(layer, dtype)
    assert found.dtype == dtype and found.shape == shape
    assert torch.equal(found, dequantize_4bit(layer.weight.data, layer.weight.quant_state))
    eye = torch.eye(shape[1], dtype=dtype, requires_grad=True)
    product = matmul_4bit(eye, layer.weight.t(), layer.weight.quant_state)
    assert torch.equal(product.T, found)
    product.backward(torch.eye(shape[1], shape[0], dtype=dtype))
    rows = min(shape)
    assert torch.equal(eye.grad[:rows], found[:rows])


@pytest.mark.nightly(but="each value once")
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_eight_bits(shape: tuple[int, int], dtype: torch.dtype, used: bool) -> None:
    layer = packed("int8", weights(*shape), dtype)
    values, scales = layer.weight.CB, layer.weight.SCB
    eye = torch.eye(shape[1], dtype=dtype, requires_grad=True)
    if used:  # moves the scales to another place
        layer(eye)
        assert layer.weight.SCB is None
    assert is_quantised(layer)
    found = dequantised(layer, dtype)
    assert found.dtype == dtype and found.shape == shape
    state = MatmulLtState()
    state.CB, state.SCB, state.is_training, state.has_fp16_weights = values, scales, True, False
    product = matmul(eye, layer.weight, state=state)
    assert torch.equal(product.T, found)
    product.backward(torch.eye(shape[1], shape[0], dtype=dtype))
    rows = min(shape)
    assert torch.equal(eye.grad[:rows], found[:rows])


def test_rows_wider_than_a_chunk() -> None:
    layer = packed("int8", weights(3, quantised_weights.CHUNK + 1), torch.bfloat16)
    wanted = layer.weight.data.double() * layer.weight.SCB.double()[:, None] / 127
    torch.testing.assert_close(dequantised(layer, torch.bfloat16).double(), wanted, rtol=2**-8, atol=0)


def test_other_layers_are_not_quantised() -> None:
    assert not is_quantised(nn.Linear(2, 3)) and not is_quantised(nn.LayerNorm(2)) and not is_quantised(nn.ReLU())


def passed(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """The outputs, and the gradient of the inputs."""
    x = x.clone().requires_grad_()
    output = layer(x)
    output.backward(torch.linspace(-1, 1, output.numel()).view_as(output).to(output.dtype))
    assert x.grad is not None
    return [output.detach(), x.grad]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_bits_are_those_of_bitsandbytes(kind: str, dtype: torch.dtype) -> None:
    layer: Any = packed(kind, weights(96, 64), dtype)
    layer.bias = nn.Parameter(torch.linspace(-1, 1, 96).to(dtype), requires_grad=False)
    x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    wanted = passed(layer, x)
    share_latest(layer, LatestWeight())
    for found, own in zip(passed(layer, x), wanted, strict=True):
        assert torch.equal(found, own) and found.dtype == own.dtype


def test_the_latest_weight_alone_is_kept() -> None:
    one, other = (packed("nf4", weights(8, 64), torch.float32) for _ in range(2))
    latest = LatestWeight()
    first = latest.of(one, torch.float32)
    assert latest.of(one, torch.float32) is first and latest.of(copy.copy(one), torch.float32) is first
    assert latest.of(other, torch.float32) is not first
    assert latest.of(one, torch.float32) is not first and torch.equal(latest.of(one, torch.float32), first)
    latest.clear()
    assert latest._weight is None


def test_once_in_a_pass_for_all_members(stories: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four members as many weights become numbers as of one, in either pass."""
    config = ModelConfig.model_validate({"id": stories, "weights": "int8", "compute": "float32"})

    def dequantisations(members: int) -> tuple[int, int]:
        base = backbones.load(config, backbones.tokenizer(config)).model
        made = bank.attach(base, [method("ia3")] * members, seeds=range(members))
        made.train()
        for member in made.members:
            disturbed(made.parameters_alone(member))
        counts = []
        with routed(made, ids[:members], (1,) * members):
            loss = made.model(input_ids=ids[:members]).logits.logsumexp(-1).sum()
            counts.append(len(calls))
            loss.backward()
            counts.append(len(calls) - counts[0])
        calls.clear()
        return counts[0], counts[1]

    calls: list[nn.Module] = []

    def counted(layer: nn.Module, dtype: torch.dtype) -> Tensor:
        calls.append(layer)
        return dequantised(layer, dtype)

    monkeypatch.setattr(quantised_weights, "dequantised", counted)
    one = dequantisations(1)
    assert one == dequantisations(4) and min(one) > 0
