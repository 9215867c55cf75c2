"""

Operations against the formula of a transformer.
Live bytes against counts by hand, and against what a real model must keep for its gradients.
The ledger against counts by hand.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import tiny
from workbench.planning.counters import DispatchMode, LiveBytes, MemoryLedger, Operations


class Names(DispatchMode):
    """Of what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.found.append(str(func))
        return self.computed(func, args, kwargs) * 1


def test_every_operation_is_handed_over_once_and_those_inside_are_not() -> None:
    names = [f"aten.{name}" for name in ("add.Tensor", "exp.default", "sum.default")]
    ones = torch.ones(3)
    with Names() as outer, Names() as inner:
        total = (ones + 1).exp().sum()
    assert inner.found == names
    assert outer.found == names
    assert torch.allclose(total, 3 * torch.tensor(2.0).exp())


def test_another_is_asked_again_when_the_inner_is_left_by_an_error() -> None:
    with Names() as outer:
        with pytest.raises(ValueError, match="enough"), Names() as inner:
            torch.ones(3).exp()
            raise ValueError("enough")
        torch.ones(3).sin()
    torch.ones(3).cos()
    assert inner.found == ["aten.ones.default", "aten.exp.default"]
    assert outer.found == [*inner.found, "aten.ones.default", "aten.sin.default"]


class _Foreign(TorchDispatchMode):
    """A mode of torch's own kind."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_modes_of_others_between_are_kept() -> None:
    with Names() as outer, _Foreign(), Names() as inner:
        torch.zeros(2)
    assert inner.found == ["aten.zeros.default"]
    assert outer.found == ["aten.zeros.default", "aten.mul.Tensor"]


def test_a_forward_pass_takes_two_operations_for_each_weight_and_token() -> None:
    model = tiny("Llama", tie_word_embeddings=False)
    ids_BL = torch.arange(12).view(2, 6)
    with Operations() as operations, torch.no_grad():
        model(input_ids=ids_BL, use_cache=False)
    matrices = sum(parameter.numel() for name, parameter in model.named_parameters() if parameter.ndim == 2)
    embeddings = model.get_input_embeddings().weight.numel()
    # Attention: queries with keys, and weights with values, over all pairs of positions in every head.
    attention = 2 * 2 * 6 * 6 * model.config.hidden_size * model.config.num_hidden_layers
    assert operations.count == 2 * 12 * (matrices - embeddings) + 2 * attention


def test_attention_counts_every_head_of_the_query_forward_and_backward() -> None:
    """Two products forward, five backward; a head of keys serves two of queries."""
    query, key, value = (torch.ones(2, heads, 6, 8, requires_grad=True) for heads in (4, 2, 2))
    with Operations() as operations:
        found = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    product = 2 * (2 * 4) * 6 * 6 * 8
    assert operations.count == 2 * product
    with Operations() as operations:
        found.sum().backward()
    assert operations.count == 5 * product


def test_products_that_add_to_what_is_there_count_too() -> None:
    """LoRA's: torch knows them only where they write elsewhere."""
    left, right = torch.ones(3, 5), torch.ones(5, 7)
    with Operations() as operations:
        torch.ones(3, 7).addmm_(left, right)
        torch.ones(2, 3, 7).baddbmm_(left.expand(2, 3, 5), right.expand(2, 5, 7))
    assert operations.count == 3 * (2 * 3 * 5 * 7)


def test_each_shape_has_its_own_count_however_often_it_comes() -> None:
    with Operations() as operations:
        for rows, columns in ((3, 7), (4, 7), (3, 9), (3, 7)):
            torch.ones(rows, 5) @ torch.ones(5, columns)
    assert operations.count == 2 * 5 * (21 + 28 + 27 + 21)


def test_products_with_packed_weights_count_as_those_with_whole_ones() -> None:
    import bitsandbytes as bnb

    layer = bnb.nn.Linear4bit(64, 32, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4").to("cpu")
    with Operations() as operations, torch.no_grad():
        layer(torch.ones(3, 5, 64, dtype=torch.bfloat16))
    assert operations.count == 2 * 15 * 64 * 32


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


def test_every_byte_is_for_something_and_the_peak_is_theirs() -> None:
    before = torch.zeros(100)
    view = before.view(10, 10)
    with MemoryLedger() as ledger:
        ledger.hold([before, view], "weights")
        with ledger.making("optimizer"):
            state = torch.zeros_like(before)
        activation = before * state
        assert ledger.now == ledger.peak == 1200
        assert ledger.at_peak == {"weights": 400, "optimizer": 400, "activations": 400}
        del activation
        smaller = state[:5] + 1
        assert ledger.now == 820 and sum(ledger.at_peak.values()) == ledger.peak == 1200
    del smaller


def test_a_tensor_may_turn_out_to_be_a_gradient() -> None:
    weight = torch.ones(50, requires_grad=True)
    with MemoryLedger() as ledger:
        (weight * 2).sum().backward()
        assert weight.grad is not None
        ledger.rename([weight.grad], "gradients")
        later = torch.zeros(200)
        assert ledger.at_peak == {"gradients": 200, "activations": 800}
        weight.grad = None
        del later
        assert ledger.now == 0
        again = torch.zeros(400)
        assert ledger.at_peak == {"gradients": 0, "activations": 1600}
    del again


def test_a_peak_is_looked_for_from_a_moment_on() -> None:
    with MemoryLedger() as ledger:
        kept = torch.zeros(100)
        large = torch.zeros(1000)
        del large
        assert ledger.peak == 4400
        ledger.restart()
        assert ledger.peak == 400 and ledger.at_peak == {"activations": 400}
        small = torch.zeros(10)
        assert ledger.peak == 440 and ledger.at_peak == {"activations": 440}
    del kept, small


def test_values_that_stand_in_a_file_take_no_memory(tmp_path: Path) -> None:
    """As of masters that a policy of freezing moved there, until they train again."""
    with MemoryLedger() as ledger:
        mapped = torch.from_file(str(tmp_path / "values"), shared=True, size=1000, dtype=torch.float32)
        view = mapped.view(10, 100).copy_(torch.ones(10, 100))
        assert ledger.now == 0 and ledger.peak == 4000
        assert view.to("cpu", copy=True).nbytes == 4000
