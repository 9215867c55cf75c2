"""Live bytes against counts by hand, and against what a real model must keep for its gradients."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.conftest import tiny
from workbench.planning.counters import LiveBytes


def test_a_storage_counts_once_until_its_last_tensor_is_gone() -> None:
    with LiveBytes() as live:
        matrix = torch.zeros(10, 10)
        assert live.now == 400
        row = matrix.t()[3, None]
        row.add_(1).clamp_(max=2)  # in place
        assert live.now == live.peak == 400
        del matrix
        assert live.now == 400
        del row
        assert (live.now, live.peak) == (0, 400)


def test_the_peak_is_the_most_at_once_and_not_the_sum() -> None:
    with LiveBytes() as live:
        tensor = torch.zeros(25)
        for _ in range(100):
            tensor = tensor + 1  # the new one is there before the old one goes
        pair = tensor.double().split(5)
        assert live.now == 100 + 200
        del pair
    assert (live.now, live.peak) == (100, 300)
    del tensor
    assert live.now == 0


def test_what_was_there_before_does_not_count() -> None:
    before = torch.zeros(1000)
    with LiveBytes() as live:
        view = before.view(10, 100).t()
        before.mul_(2)
        torch.add(before, 1, out=before)
        assert live.peak == 0
        del view
        kept = before[:5] * 2
        assert live.now == 20
    del before
    assert live.now == 20 and len(kept) == 5


def test_a_storage_that_a_tensor_is_given_counts() -> None:
    tensor = torch.zeros(3)
    with LiveBytes() as live:
        tensor.set_(torch.zeros(5).untyped_storage())  # type: ignore[call-overload]
        assert live.now == 20
        tensor.set_(torch.UntypedStorage(80))  # type: ignore[call-overload]
        assert live.now == 80


@pytest.mark.parametrize("make", [lambda: torch.tensor([1.0, 2.0]), lambda: torch.as_tensor([1.0, 2.0])])
def test_tensors_of_numbers_count(make: Callable[[], Tensor]) -> None:
    with LiveBytes() as live:
        made = make()
        assert live.now == made.nbytes == 8


def test_one_inside_another() -> None:
    with LiveBytes() as outer:
        first = torch.zeros(10)
        with LiveBytes() as inner:
            second = first + 1
            del first
        third = second + 1
    assert (outer.now, outer.peak, inner.now, inner.peak) == (80, 80, 40, 40)
    del second, third
    assert outer.now == inner.now == 0


def test_what_autograd_keeps_counts_until_the_backward_pass() -> None:
    weight = torch.ones(50, requires_grad=True)
    with LiveBytes() as live:
        total = weight.exp().sum()  # keeps its result, 200 bytes
        assert live.now == 200 + 4
        total.backward()
        assert live.now == 200 + 4  # the gradient alone
        weight.grad = None
        assert live.now == 4
    del total


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x * 2)
        return x + 1

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:  # type: ignore[override]
        (kept,) = ctx.saved_tensors  # type: ignore[attr-defined]
        product: Tensor = grad * kept
        return product


def test_what_functions_of_our_own_keep_counts() -> None:
    start = torch.ones(25, requires_grad=True)
    with LiveBytes() as live:
        end = _Doubled.apply(start)  # type: ignore[no-untyped-call]
        assert live.now == 100 + 100
        del end
        assert live.now == 0


def test_a_model_without_gradients_frees_its_layers_and_with_them_keeps_each() -> None:
    """Twice the layers: the same peak without gradients, twice the kept bytes with them."""
    peaks, kept = [], []
    ids_BL = torch.arange(48).view(3, 16)
    for layers in (2, 4):
        body: nn.Module = tiny("Llama", num_hidden_layers=layers).model  # type: ignore[assignment]
        with torch.no_grad(), LiveBytes() as live:
            body(input_ids=ids_BL, use_cache=False)
        peaks.append(live.peak)
        with LiveBytes() as live:
            hidden = body(input_ids=ids_BL, use_cache=False).last_hidden_state
            kept.append(live.now)
            hidden.sum().backward()
            del hidden
        gradients = sum(each.grad.nbytes for each in body.parameters() if each.grad is not None)
        gc.collect()
        assert live.now == gradients > 0
    assert peaks[1] == peaks[0]
    layer = kept[1] - kept[0]
    assert layer % 2 == 0 and 0 < kept[0] - layer < layer  # embeddings, positions and the last norm


def test_tensors_without_values_count_on_their_own_device() -> None:
    with FakeTensorMode(), LiveBytes("cuda") as accelerator, LiveBytes() as host:
        tensor = torch.empty(250, device="cuda")
        doubled = tensor * 2
        torch.empty(10)
        assert accelerator.now == tensor.nbytes + doubled.nbytes == 2000
        del doubled
        assert accelerator.now == 1000 and host.peak == 40
