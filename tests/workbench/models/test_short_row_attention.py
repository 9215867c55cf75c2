"""Attention of short rows in half precision: what float32 gives, for every mask and grouping of heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from workbench.models import packed_attention, short_row_attention

ROUNDING = 2**-7
"""Relative, of some products in bfloat16, each of which rounds by 2^-9 at most."""


class Attending(nn.Module):
    """What models tell about their attention."""

    def __init__(self, groups: int = 1, *, is_causal: bool = True) -> None:
        super().__init__()
        self.num_key_value_groups, self.is_causal = groups, is_causal


def _inputs(heads: int = 4, shared: int = 4, queries: int = 12, keys: int = 12) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = ((heads, queries), (shared, keys), (shared, keys))
    return [torch.randn(2, length, count, 8).bfloat16().transpose(1, 2) for count, length in sizes]


def _hidden_tail(queries: int = 12, keys: int = 12) -> Tensor:
    """A mask (B, 1, L, S) that hides the last keys of one row."""
    seen = torch.ones(2, 1, queries, keys, dtype=torch.bool)
    seen[1, :, :, 8:] = False
    return seen


def _both(kernel: Any, module: nn.Module, inputs: list[Tensor], mask: Tensor | None) -> list[Tensor]:
    """Output and gradients, as float32."""
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    output, _ = kernel(module, *leaves, mask, dropout=0.0)
    torch.manual_seed(1)
    output.backward(torch.randn(output.shape).to(output.dtype))
    return [output.detach().float(), *(each.grad.float() for each in leaves if each.grad is not None)]


ADDED = torch.zeros(2, 1, 12, 12).masked_fill(~_hidden_tail(), -torch.inf)
CASES: dict[str, tuple[list[Tensor], nn.Module, Tensor | None]] = {
    "causal": (_inputs(), Attending(), None),
    "everything": (_inputs(), Attending(is_causal=False), None),
    "grouped heads": (_inputs(heads=6, shared=2), Attending(3), None),
    "grouped heads, mask": (_inputs(heads=6, shared=2), Attending(3), _hidden_tail()),
    "boolean mask": (_inputs(), Attending(), _hidden_tail()),
    "added mask": (_inputs(), Attending(), ADDED.bfloat16()),
    "other keys": (_inputs(queries=5), Attending(is_causal=False), _hidden_tail(queries=5)),
}


@pytest.mark.parametrize("case", CASES)
def test_half_precision_rounds_little(case: str) -> None:
    packed_attention.register()
    inputs, module, mask = CASES[case]
    wide = mask.float() if mask is not None and mask.is_floating_point() else mask
    exact = _both(sdpa_attention_forward, module, [each.float() for each in inputs], wide)
    assert len(exact) == 4
    found = _both(AttentionInterface()["sdpa"], module, inputs, mask)
    for one, other in zip(found, exact, strict=True):
        assert float((one - other).norm() / other.norm()) < ROUNDING


def test_a_row_that_sees_nothing_harms_no_other() -> None:
    packed_attention.register()
    inputs, seen = _inputs(), _hidden_tail()
    known = _both(AttentionInterface()["sdpa"], Attending(), inputs, seen)[0]
    seen[1, :, -1] = False
    found = _both(AttentionInterface()["sdpa"], Attending(), inputs, seen)[0]
    assert torch.isfinite(found).all()
    assert torch.equal(found[:, :-1], known[:, :-1])


@pytest.mark.parametrize("of", ["dropout", "bias"])
def test_what_is_random_or_learns_is_computed_in_float32(of: str) -> None:
    packed_attention.register()
    query, key, value = _inputs()
    bias = torch.randn(1, 4, 12, 12).bfloat16().requires_grad_() if of == "bias" else None
    settings: dict[str, Any] = {"dropout": 0.5 if of == "dropout" else 0.0, "position_bias": bias}
    torch.manual_seed(2)
    found, _ = AttentionInterface()["sdpa"](Attending(), query, key, value, None, **settings)
    torch.manual_seed(2)
    settings["position_bias"] = None if bias is None else bias.float()
    exact, _ = sdpa_attention_forward(Attending(), query.float(), key.float(), value.float(), None, **settings)
    assert found.dtype == torch.bfloat16 and torch.equal(found, exact.bfloat16())
    assert found.requires_grad == (bias is not None)


def test_float32_and_long_rows_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    packed_attention.register()
    kernel, module, inputs = AttentionInterface()["sdpa"], Attending(), _inputs()
    wide = [each.float() for each in inputs]
    known = sdpa_attention_forward(module, *wide, None, dropout=0.0)[0]
    assert torch.equal(kernel(module, *wide, None, dropout=0.0)[0], known)
    monkeypatch.setattr(short_row_attention, "LONGEST", 12)
    known = sdpa_attention_forward(module, *inputs, None, dropout=0.0)[0]
    assert torch.equal(kernel(module, *inputs, None, dropout=0.0)[0], known)
