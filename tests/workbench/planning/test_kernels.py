"""Kernels that are noted where tensors are imagined are those of the real model, and can be called again."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.conftest import tiny
from workbench.planning.fake_tensors import fake_tensors, real_tensors, to_fake
from workbench.planning.flop_counter import Operations
from workbench.planning.kernels import Kernel, Kernels, Like


@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_imagined_step_calls_the_kernels_of_the_real_one(checkpointing: bool) -> None:
    ids_BL = torch.arange(12).view(2, 6)

    def step(model: torch.nn.Module) -> Counter[Kernel]:
        model.train()
        if checkpointing:
            model.activation_checkpointing_enable()  # type: ignore[operator]
        with Kernels() as found:
            model(input_ids=ids_BL, use_cache=False).logits.sum().backward()
        return Counter(found.calls)

    real = step(tiny("Llama"))
    with fake_tensors():
        with real_tensors(), torch.device("meta"):
            other = AutoModelForCausalLM.from_config(tiny("Llama").config)
        to_fake(other, torch.device("cpu"))
        assert step(other) == real


@pytest.mark.parametrize(
    "tensor", [torch.zeros(3, 4), torch.zeros(4, 3).T, torch.zeros(3, 1).expand(3, 5), torch.zeros(0, 2)]
)
def test_a_kind_of_tensor_knows_its_bytes(tensor: Tensor) -> None:
    assert Like.of(tensor).bytes == tensor.untyped_storage().nbytes()


def test_a_kernel_can_be_called_again() -> None:
    table, ids = torch.randn(7, 3), torch.tensor([1, 6, 6])
    numbers = [torch.zeros(2), torch.zeros(2), torch.zeros(4)]
    with Kernels() as found:
        torch._foreach_add_(numbers, 1.0)
        torch.nn.functional.embedding(ids, table)
    adding, looking = found.calls
    made: list[tuple[tuple[int, ...], int]] = []

    def make(like: Like, number: int) -> Tensor:
        made.append((like.shape, number))
        return table if like.shape == (7, 3) else torch.zeros(like.shape)

    arguments, named = adding.arguments(make)
    adding.operation(*arguments, **named)
    assert made == [((2,), 0), ((2,), 1), ((4,), 0)]
    assert arguments[0][0].tolist() == [1, 1] and arguments[0][0] is not arguments[0][1]
    # Indices are known where they were real, and a table is not read as a whole.
    arguments, named = looking.arguments(make)
    assert torch.equal(looking.operation(*arguments, **named), table[ids])
    assert looking.bytes == 2 * looking.written == 2 * ids.numel() * 3 * 4


def test_kernels_differ_in_sizes_and_not_in_fractions() -> None:
    with Kernels() as found:
        x = torch.zeros(4, 4)
        for each in (x * 0.5, x * 0.25, x[:2] * 0.5, x.sum(0), x.sum(1)):
            assert each.isfinite().all()
    products = [kernel for kernel in found.calls if kernel.operation is torch.ops.aten.mul.Tensor]
    sums = [kernel for kernel in found.calls if kernel.operation is torch.ops.aten.sum.dim_IntList]
    assert products[0] == products[1] != products[2] and sums[0] != sums[1]


def test_operations_are_those_that_are_counted(llama: torch.nn.Module) -> None:
    with Operations() as operations, Kernels() as found:
        llama(input_ids=torch.arange(12).view(2, 6), use_cache=False).logits.sum().backward()
    assert sum(kernel.flops for kernel in found.calls) == operations.count > 0
