"""Members with layers of their own dequantise a shared weight once in each pass, to the bits of bitsandbytes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.adapters.banks.test_bank_methods import disturbed, ids, method, routed
from tests.adapters.precision.test_dequantised import packed, weights
from workbench.adapters.banks import bank
from workbench.adapters.precision import dequantised, latest_weight
from workbench.adapters.precision.latest_weight import LatestWeight, share
from workbench.config import ModelConfig
from workbench.models import backbones


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
    share(layer, LatestWeight())
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
        return dequantised.dequantised(layer, dtype)

    monkeypatch.setattr(latest_weight, "dequantised", counted)
    one = dequantisations(1)
    assert one == dequantisations(4) and min(one) > 0
