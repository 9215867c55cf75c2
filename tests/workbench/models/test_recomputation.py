"""Recomputed elementwise operations give the same bits, and what they read is all that stays."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.adapters import contract
from workbench.adapters.row_dropout import RowDraw, drawing
from workbench.models import fused_lora
from workbench.models.recomputation import recomputing_elementwise
from workbench.planning.counters import LiveBytes
from workbench.training import activation_checkpointing

CPU = torch.device("cpu")
STILL = {"T5": {"dropout_rate": 0.0}, "Bert": {"attention_probs_dropout_prob": 0.0}, "GPT2": {"attn_pdrop": 0.0}}


def _gradients(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    draw = RowDraw(0, 3, np.arange(2))
    with drawing([draw], CPU):
        model(**contract.inputs(model)).loss.backward()
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


@pytest.mark.nightly(but=["Llama-lora"])
@pytest.mark.parametrize("method", ["lora", "dora", "houlsby", "full"])
@pytest.mark.parametrize("kind", ["Llama", "Gemma3Text", "GPT2", "Bert", "T5", "Mixtral"])
def test_gradients_are_equal_to_the_last_bit_with_dropout(kind: str, method: str) -> None:
    section = contract.section(method)
    if "dropout" in type(section).model_fields:
        section = section.model_copy(update={"dropout": 0.3})
    model: Any = contract.attach(contract.build(kind, **STILL.get(kind, {})), section)
    with torch.no_grad():
        for each in model.parameters():
            if each.requires_grad:
                each += 0.02 * torch.randn_like(each)
    fused_lora.fuse(model)
    for module in model.train().modules():
        if type(module) is nn.Dropout:  # the backbone's own draws other numbers each time
            module.p = 0.0
    backbone = model if method == "full" else model.get_base_model()
    kept = _gradients(model)
    for wanted in ("elementwise", 0.5):
        activation_checkpointing.keep(backbone, wanted)
        again = _gradients(model)
        assert len(again) == len(kept) > 0
        assert all(torch.equal(one, other) for one, other in zip(again, kept, strict=True))


def _peak(forward: Callable[[Tensor], Tensor], x: Tensor) -> tuple[int, Tensor]:
    """Bytes that a forward pass leaves, and the gradient of its input."""
    x = x.clone().requires_grad_()
    with LiveBytes() as alive:
        loss = forward(x).sum()
        left = alive.now
        loss.backward()
    assert x.grad is not None
    return left, x.grad


def test_of_a_gated_mlp_after_a_norm_the_products_alone_stay() -> None:
    """The norm's wide copy, its root and result, SiLU and the product before the last layer are not kept."""
    torch.manual_seed(0)
    tokens, width, mlp, element = 64, 16, 48, torch.float32.itemsize
    gate, up, down = (torch.randn(*shape) for shape in ((width, mlp), (width, mlp), (mlp, width)))
    weight = torch.randn(width)

    def forward(x: Tensor) -> Tensor:
        wide = x.double()
        normal = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).float()
        return (F.silu(normal @ gate) * (normal @ up)) @ down

    x = torch.randn(tokens, width)
    kept, wanted = _peak(forward, x)
    left, found = _peak(lambda x: recomputing_elementwise(forward, x), x)
    assert torch.equal(found, wanted)
    products, roots, scalar = 2 * tokens * mlp * element, 2 * tokens * torch.float64.itemsize, element
    assert left == products + roots // 2 + scalar, "a root is computed from its sum of squares"
    assert kept >= 1.7 * left


def test_a_result_smaller_than_what_it_reads_stays_itself() -> None:
    """Reading again would keep float32 of softmax in place of its bfloat16."""
    scores = torch.randn(64, 64)

    def forward(x: Tensor) -> Tensor:
        return (x + scores).softmax(-1).bfloat16() @ torch.ones(64, 1, dtype=torch.bfloat16, requires_grad=True)

    x = torch.randn(64, 64)
    kept, wanted = _peak(forward, x)
    left, found = _peak(lambda x: recomputing_elementwise(forward, x), x)
    assert left == kept and torch.equal(found, wanted)


def test_what_is_overwritten_is_read_before() -> None:
    """A cast's gradient needs none of its values, so that autograd lets them be overwritten."""
    weight = torch.randn(8, 8, requires_grad=True)

    def forward(x: Tensor) -> Tensor:
        product = x @ weight
        wide = product.double()
        product.mul_(0.0)
        doubled = wide * 2
        narrow = doubled.float() + 0
        doubled.add_(1.0)  # a result that is itself overwritten, after another has read it
        return wide.sin().float() @ weight + narrow @ weight + doubled.cos().float() @ weight

    x = torch.randn(4, 8)
    forward(x).sum().backward()
    wanted, weight.grad = weight.grad, None
    recomputing_elementwise(forward, x).sum().backward()
    assert wanted is not None and torch.equal(weight.grad, wanted)


def test_nothing_is_alive_after_the_backward_pass() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    seen: list[weakref.ref[Tensor]] = []

    def forward(x: Tensor) -> Tensor:
        product = x @ weight
        seen.append(weakref.ref(product))
        return F.silu(product) @ weight

    gc.disable()
    try:
        recomputing_elementwise(forward, torch.randn(4, 8)).sum().backward()
        assert seen[0]() is None, "without the collector of cycles"
    finally:
        gc.enable()


def test_a_graph_that_is_kept_is_walked_twice() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    loss = recomputing_elementwise(lambda x: (F.silu(x @ weight) * 3) @ weight, torch.randn(4, 8)).sum()
    loss.backward(retain_graph=True)
    assert weight.grad is not None
    once = weight.grad.clone()
    loss.backward()
    assert torch.equal(weight.grad, 2 * once)


def test_weights_that_are_unpacked_and_results_nobody_keeps_are_let_go_of() -> None:
    """As without recomputing, or a block would hold all of its weights unpacked until its end."""
    codes, x = torch.ones(64, 64, dtype=torch.int8), torch.randn(4, 64, requires_grad=True)

    class Unpacked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x @ (codes.float() * 0.01)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    def forward(x: Tensor) -> Tensor:
        for _ in range(4):
            x = Unpacked.apply(x) + 1  # type: ignore[no-untyped-call]
        return x

    peaks = []
    for call in (forward, lambda x: recomputing_elementwise(forward, x)):
        with LiveBytes() as alive:
            call(x)
        peaks.append(alive.peak)
    assert peaks[1] == peaks[0]
