"""Attention of short rows in half precision: what float32 gives, rounded once, in both directions."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from workbench import attention


@pytest.fixture
def inputs() -> tuple[torch.Tensor, ...]:
    """Query, key, value (B, heads, L, D) and an additive mask that hides the last tokens of one row."""
    torch.manual_seed(0)
    mask = torch.zeros(2, 1, 12, 12)
    mask[1, :, :, 8:] = -torch.inf
    return (*(torch.randn(2, 3, 12, 8).bfloat16() for _ in range(3)), mask.bfloat16())


def test_half_precision_rounds_once(inputs: tuple[torch.Tensor, ...]) -> None:
    attention.register()
    kernel, module = AttentionInterface()["sdpa"], nn.Module().eval()
    query, key, value, mask = inputs
    leaves = [each.clone().requires_grad_() for each in (query, key, value)]
    wide = [each.float().requires_grad_() for each in (query, key, value)]
    found, _ = kernel(module, *leaves, mask, dropout=0.0)
    exact, _ = sdpa_attention_forward(module, *wide, mask.float(), dropout=0.0)
    assert found.dtype == torch.bfloat16 and torch.equal(found, exact.bfloat16())
    found.backward(torch.ones_like(found))
    exact.backward(torch.ones_like(exact))
    for leaf, other in zip(leaves, wide, strict=True):
        assert leaf.grad is not None and other.grad is not None
        assert leaf.grad.dtype == torch.bfloat16 and torch.equal(leaf.grad, other.grad.bfloat16())


def test_float32_and_long_rows_are_left_alone(
    inputs: tuple[torch.Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    attention.register()
    kernel, module = AttentionInterface()["sdpa"], nn.Module().eval()
    query, key, value, mask = inputs
    wide = [each.float() for each in (query, key, value)]
    known = sdpa_attention_forward(module, *wide, mask.float(), dropout=0.0)[0]
    assert torch.equal(kernel(module, *wide, mask.float(), dropout=0.0)[0], known)
    monkeypatch.setattr(attention, "LONGEST", 12)
    known = sdpa_attention_forward(module, query, key, value, mask, dropout=0.0)[0]
    assert torch.equal(kernel(module, query, key, value, mask, dropout=0.0)[0], known)
