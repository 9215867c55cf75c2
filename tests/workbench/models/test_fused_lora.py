"""The fused LoRA layer against PEFT's own forward and backward pass."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from workbench.models.fused_lora import FusedLoraLinear, fuse
from workbench.models.weight_storage import compute_in


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
