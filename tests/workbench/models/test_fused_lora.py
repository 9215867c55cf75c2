"""The fused LoRA layer against PEFT's own forward and backward pass."""

from __future__ import annotations

import copy

import pytest
import torch
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from peft import LoraConfig, get_peft_model
from torch import nn

from workbench.models import weight_formats
from workbench.models.fused_lora import FusedLoraLinear, FusedQuantisedLora, fuse
from workbench.models.weight_formats import compute_in

PACKED = pytest.mark.parametrize("weights", ["int8", "nf4", "fp4"])


def _peft(dtype: torch.dtype = torch.float64, **options: object) -> nn.Module:
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4, bias=False)).to(dtype)
    if dtype == torch.bfloat16:
        compute_in(base.requires_grad_(False), torch.float32)
    model = get_peft_model(base, LoraConfig(r=3, lora_alpha=7, target_modules=["0", "2"], **options))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
        if dtype == torch.float64 and parameter.requires_grad:
            parameter.data = parameter.data.double()
    return model.train()


def _run(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    output = model(x)
    output.square().sum().backward()
    return [output.detach(), x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"use_dora": True}])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_equals_peft(dtype: torch.dtype, options: dict[str, bool]) -> None:
    plain = _peft(dtype, **options)
    fused = copy.deepcopy(plain)
    fuse(fused)
    assert sum(isinstance(module, FusedLoraLinear) for module in fused.modules()) == 2
    x = torch.randn(2, 7, 6, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    for found, wanted in zip(_run(fused, x), _run(plain, x), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4 if dtype == torch.bfloat16 else 1e-9)


def test_gradcheck() -> None:
    model = _peft()
    fuse(model)
    assert torch.autograd.gradcheck(model, torch.randn(4, 6, dtype=torch.float64, requires_grad=True))


def test_disabled_merged_and_dropout_go_through_peft() -> None:
    plain = _peft(lora_dropout=0.5)
    fused = copy.deepcopy(plain)
    fuse(fused)
    x = torch.randn(3, 6, dtype=torch.float64)
    outputs = []
    for model in (plain, fused):
        torch.manual_seed(5)
        dropped = model(x)
        with model.disable_adapter():
            base = model(x)
        model.eval()
        outputs.append((dropped, base, model(x), model.merge_and_unload()(x)))
    for found, wanted in zip(*outputs, strict=True):
        torch.testing.assert_close(found, wanted)
    assert not torch.allclose(outputs[1][0], outputs[1][2])


class _Block(nn.Module):
    """Two layers, of which the first has a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 96), nn.Linear(96, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return output


def _quantised(weights: str, compute: torch.dtype, **options: object) -> nn.Module:
    """LoRA over bitsandbytes' layers; its B is not zero."""
    torch.manual_seed(0)
    model = _Block()
    for name in ("first", "second"):
        plain = getattr(model, name)
        shape = (plain.in_features, plain.out_features, plain.bias is not None)
        packed = (
            Linear8bitLt(*shape, has_fp16_weights=False)
            if weights == "int8"
            else Linear4bit(*shape, compute_dtype=compute, quant_type=weights)
        )
        packed.load_state_dict(plain.state_dict())
        setattr(model, name, packed.to("cpu"))
    weight_formats.settle(model, compute)
    model.requires_grad_(False)
    model.is_loaded_in_8bit, model.is_loaded_in_4bit = weights == "int8", weights != "int8"
    adapted = get_peft_model(model, LoraConfig(r=3, lora_alpha=7, target_modules=["first", "second"], **options))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return adapted.to(compute).train()


@pytest.mark.nightly(but="each value once")
@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"lora_dropout": 0.5}])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@PACKED
def test_over_quantised_weights_equals_peft(weights: str, compute: torch.dtype, options: dict[str, object]) -> None:
    plain = _quantised(weights, compute, **options)
    fused = copy.deepcopy(plain)
    fuse(fused)
    assert sum(isinstance(module, FusedQuantisedLora) for module in fused.modules()) == 2
    x = torch.randn(2, 7, 64, dtype=compute)
    found, wanted = [], []
    for model, kept in ((fused, found), (plain, wanted)):
        torch.manual_seed(5)
        kept += _run(model, x)
        with torch.no_grad(), model.disable_adapter():
            kept.append(model(x))
    for one, other in zip(found, wanted, strict=True):
        error = 0.02 if compute == torch.bfloat16 else 1e-5
        torch.testing.assert_close(one, other, rtol=error, atol=error * float(other.abs().max()))


@PACKED
def test_evaluation_over_quantised_weights_is_that_of_an_unfused_layer(weights: str) -> None:
    """8-bit layers evaluate by a product of integers, which a run that loads what was saved does too."""
    plain = _quantised(weights, torch.float32)
    fused = copy.deepcopy(plain)
    fuse(fused)
    x = torch.randn(2, 7, 64)
    with torch.no_grad():
        torch.testing.assert_close(fused.eval()(x), plain.eval()(x), rtol=1e-5, atol=1e-5)


def test_the_weight_of_a_quantised_layer_is_not_kept() -> None:
    """Only what is packed is saved for the backward pass."""
    model = _quantised("nf4", torch.float32)
    fuse(model)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
        model(torch.randn(2, 7, 64, requires_grad=True))
    dense = {(96, 64), (32, 96)}
    assert saved and not any(tuple(each.shape) in dense and each.is_floating_point() for each in saved)
