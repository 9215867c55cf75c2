"""Layers in FP8 against the numbers that they store, and runs over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.adapters.precision import fp8_layers
from workbench.adapters.precision.fp8_layers import E4M3, LARGEST, Fp8Linear, rounded
from workbench.config import ModelConfig
from workbench.models import backbones

IDS = torch.arange(3, 40)[None]


def layer(inputs: int = 32, outputs: int = 48, *, bias: bool = True) -> tuple[Fp8Linear, nn.Linear]:
    """A layer in FP8, and a plain one of its values."""
    torch.manual_seed(0)
    plain = nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)
    packed = fp8_layers.pack(plain)
    rows, scale = rounded(plain.weight)
    packed.weight.data, packed.weight_scale = rows.view(torch.uint8), scale[:, 0]
    plain.weight.data = packed.dense(torch.float32)
    return packed, plain


@pytest.mark.parametrize("factor", [1e-6, 1.0, 1e6])
def test_rounding_is_by_row_and_to_a_sixteenth(factor: float) -> None:
    rows = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)) * factor
    rows[3] *= 1e4
    values, scale = rounded(rows)
    found = values.float() * scale
    large = rows.abs() > 2**-15 * rows.abs().amax(1, keepdim=True)
    assert float(((found - rows).abs() / rows.abs())[large].max()) <= 1 / 16
    assert torch.equal(values.float().abs().amax(1), torch.full((50,), LARGEST)), "the largest of a row is exact"
    again, _ = rounded(found)
    assert torch.equal(again.float(), values.float()), "what is rounded stays"
    assert torch.equal(rounded(torch.zeros(2, 4))[0].float(), torch.zeros(2, 4))


@pytest.mark.parametrize(("dtype", "far"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_a_product_is_that_of_rounded_numbers_and_its_gradient_that_of_the_dequantised(
    dtype: torch.dtype, far: float
) -> None:
    packed, plain = layer()
    x = (100 * torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))).to(dtype).requires_grad_()
    values, scale = rounded(x.detach())
    wanted = F.linear(values.float() * scale, plain.weight, plain.bias)
    found = packed(x)
    assert found.dtype == dtype and float((found.detach().float() - wanted).norm() / wanted.norm()) < far
    found += 1  # what it gives may be changed in place
    grad = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(2)).to(dtype)
    (x_grad,) = torch.autograd.grad(found, [x], grad)
    exact = grad.float() @ plain.weight
    assert float((x_grad.float() - exact).norm() / exact.norm()) < max(far, 5e-6)


def test_a_token_is_rounded_alone() -> None:
    """So that no row depends on those beside it, an infinity included."""
    packed, _ = layer()
    x = torch.randn(1, 4, 32)
    wanted = packed(x)
    x[:, 2] = torch.inf
    assert torch.equal(packed(x)[:, [0, 1, 3]], wanted[:, [0, 1, 3]])


def test_a_card_is_asked_for_the_product_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it multiplies FP8, in bfloat16 and whole words; what it is handed gives the same product."""
    packed, _ = layer(bias=False)
    asked: list[tuple[Tensor, ...]] = []

    def scaled(left: Tensor, right: Tensor, *scales: Any, output_dtype: torch.dtype) -> Tensor:
        assert left.dtype == right.dtype == E4M3 and right.stride(0) == 1, "a column-major right side"
        assert scales[1] == scales[3] == F.ScalingType.RowWise
        asked.append((left, right))
        return ((left.float() * scales[0]) @ (right.float() * scales[2])).to(output_dtype)

    monkeypatch.setattr(fp8_layers, "multiplies", lambda _: True)
    monkeypatch.setattr(F, "scaled_mm", scaled)
    x = torch.randn(5, 32).bfloat16()
    found = packed(x)
    assert len(asked) == 1
    monkeypatch.setattr(fp8_layers, "multiplies", lambda _: False)
    torch.testing.assert_close(found, packed(x), rtol=2e-2, atol=1e-3)
    monkeypatch.setattr(fp8_layers, "multiplies", lambda _: True)
    packed(x.float()), layer(24, 48)[0](torch.randn(5, 24).bfloat16())
    assert len(asked) == 1, "other precisions and widths are emulated"


def test_the_devices_that_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not fp8_layers.multiplies(torch.device("cpu"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, wanted in (((8, 6), False), ((8, 9), True), ((9, 0), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert fp8_layers.multiplies(torch.device("cuda", 0)) == wanted


def test_a_backbone_takes_a_byte_a_weight_and_keeps_its_scales(tmp_path: Path) -> None:
    backbone = backbones.load(ModelConfig(id="starter", weights="fp8", compute="bfloat16"), None)
    layers = [each for each in backbone.model.modules() if isinstance(each, Fp8Linear)]
    packed = sum(each.weight.numel() for each in layers)
    rest = sum(each.nbytes for each in backbone.model.parameters() if each.dtype != torch.uint8)
    assert backbone.weight_bytes == packed + rest + 4 * sum(each.out_features for each in layers)
    assert any("emulated" in note for note in backbone.notes)
    scales = [each.weight_scale.clone() for each in layers]
    backbone.model.bfloat16()
    assert all(torch.equal(each.weight_scale, scale) for each, scale in zip(layers, scales, strict=True))
    plain = backbones.load(ModelConfig(id="starter", weights="float32"), None).model
    dense = backbones.load(ModelConfig(id="starter", weights="fp8", compute="float32"), None).model
    with torch.no_grad():
        wanted, found = plain(input_ids=IDS).logits, dense(input_ids=IDS).logits
        unpacked = dense.dequantize(torch.float32)
        assert not any(isinstance(each, Fp8Linear) for each in unpacked.modules())
        half = unpacked(input_ids=IDS).logits
    error, of_weights = (float((each - wanted).norm() / wanted.norm()) for each in (found, half))
    assert of_weights < error < 0.03
