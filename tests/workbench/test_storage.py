"""Half-precision storage with float32 products: the same function as a float32 copy, at half the bytes."""

from __future__ import annotations

import copy

import torch
from torch import nn

from workbench.storage import compute_in_float32, weight_bytes


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 5), nn.GELU(), nn.Linear(5, 3, bias=False))


def test_equals_a_float32_copy_in_values_and_gradients() -> None:
    stored = _model().to(torch.bfloat16).requires_grad_(False)
    plain = copy.deepcopy(stored).float()
    compute_in_float32(stored)
    ids = torch.arange(11)[None]
    bump = [torch.zeros(1, 11, 8, requires_grad=True) for _ in range(2)]
    outputs = [model[1:](model[0](ids) + offset) for model, offset in zip((stored, plain), bump, strict=True)]
    for output in outputs:
        output.square().sum().backward()
    assert outputs[0].dtype == torch.float32
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=0)
    torch.testing.assert_close(bump[0].grad, bump[1].grad, rtol=0, atol=0)


def test_weights_keep_their_bytes() -> None:
    model = _model().to(torch.bfloat16).requires_grad_(False)
    before = weight_bytes(model)
    compute_in_float32(model)
    small = sum(p.nbytes for name, p in model.named_parameters() if name.startswith("1.") or name.endswith("bias"))
    assert weight_bytes(model) == before + small // 2
    assert model[2].weight.dtype == torch.bfloat16
