"""Half-precision storage with other products: the same function as a converted copy, at half the bytes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from workbench.models.weight_storage import compute_in, weight_bytes

STORED = pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 5), nn.GELU(), nn.Linear(5, 4, bias=False))
    return nn.Sequential(*layers, Conv1D(3, 4))


@STORED
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_equals_a_converted_copy_in_values_and_gradients(stored: torch.dtype, compute: torch.dtype) -> None:
    """Biases that train have their gradient too."""
    kept = _model().to(stored).requires_grad_(False)
    plain = copy.deepcopy(kept).to(compute)
    compute_in(kept, compute)
    ids = torch.arange(11)[None]
    outputs, bumps = [], []
    for model in (kept, plain):
        model[2].bias.requires_grad_(True)
        bumps.append(torch.zeros(1, 11, 8, requires_grad=True, dtype=compute))
        outputs.append(model[1:](model[0](ids) + bumps[-1]))
        outputs[-1].square().sum().backward()
    assert outputs[0].dtype == compute
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=0)
    torch.testing.assert_close(bumps[0].grad, bumps[1].grad, rtol=0, atol=0)
    precision = {"rtol": 1e-6, "atol": 1e-7} if compute == torch.float32 else {"rtol": 1e-2, "atol": 1e-3}
    torch.testing.assert_close(kept[2].bias.grad, plain[2].bias.grad, **precision)


@STORED
def test_what_it_gives_may_be_changed_in_place(stored: torch.dtype) -> None:
    """As that of an ordinary layer may; PEFT's AdaLoRA does."""
    layer = nn.Linear(8, 5).to(stored).requires_grad_(False)
    compute_in(layer, torch.float32)
    x, added = torch.randn(2, 3, 8, requires_grad=True), torch.ones(2, 3, 5, requires_grad=True)
    output = layer(x)
    output += added
    output.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, layer.weight.float().sum(0).expand(2, 3, 8))
    assert added.grad is not None and torch.equal(added.grad, torch.ones(2, 3, 5))


def test_a_weight_that_trains_has_its_gradient() -> None:
    kept = _model().to(torch.bfloat16).requires_grad_(False)
    compute_in(kept, torch.float32)
    kept[2].weight.requires_grad_(True)
    kept(torch.arange(11)[None]).sum().backward()
    assert kept[2].weight.grad.any()


@STORED
def test_weights_keep_their_bytes(stored: torch.dtype) -> None:
    model = _model().to(stored).requires_grad_(False)
    before = weight_bytes(model)
    compute_in(model, torch.float32)
    small = sum(p.nbytes for name, p in model.named_parameters() if name.startswith("1.") or name.endswith("bias"))
    assert weight_bytes(model) == before + small // 2
    assert {model[2].weight.dtype, model[5].weight.dtype, model[0].weight.dtype} == {stored}


def test_shared_weights_count_once() -> None:
    model = nn.ModuleList([nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False)])
    assert weight_bytes(model) == 2 * 4 * 12
    model[1].weight.data = model[0].weight.data
    assert weight_bytes(model) == 4 * 12
