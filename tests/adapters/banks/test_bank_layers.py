"""Low-rank products in half precision, in a window of whole stretches; grouped products of unequal members."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import tiny
from workbench.adapters import Lora
from workbench.adapters.banks import bank, bank_layers
from workbench.adapters.banks.bank import Bank
from workbench.adapters.banks.bank_layers import STRETCH, MemberRows
from workbench.adapters.precision.grouped_products import KernelGroups, PaddedGroups, RowGroups
from workbench.adapters.row_dropout import RowDraw, drawing

TOKENS = (41, 7, 33, 64)
"""Of each member's one row: the windows of the first two reach into the next, that of the third from the one before."""


def _made() -> tuple[Bank, nn.Module]:
    model = tiny("Llama", head="CausalLM").bfloat16().requires_grad_(False)
    made = bank.attach(model, [Lora(rank=4, alpha=8)] * len(TOKENS), seeds=range(len(TOKENS)))
    made.train()
    for name, parameter in made.model.named_parameters():
        if parameter.requires_grad:
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            parameter.data = (0.2 * torch.randn(parameter.shape, generator=generator)).bfloat16()
    return made, next(layer for layer in made.model.modules() if isinstance(layer, bank_layers.RoutedLora))


def _computed(made: Bank, layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output of a layer, and the gradients of its input and of every member's weights, by member."""
    x = x.clone().requires_grad_()
    weights = [each for member in made.members for each in made.parameters_of(member).values() if _in(layer, each)]
    rows = [MemberRows(member, 1, tokens) for member, tokens in zip(made.members, TOKENS, strict=True)]
    with made.route(rows, length=None):
        output = layer(x)
        return output, *_parts(torch.autograd.grad(output.float().square().sum(), [x, *weights]))


def _in(layer: nn.Module, parameter: Tensor) -> bool:
    return any(parameter is each for each in layer.parameters())


def _parts(grads: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    return grads[0], list(grads[1:])


def _input(layer: nn.Module) -> Tensor:
    width = layer.get_base_layer().in_features  # type: ignore[operator]
    return torch.randn(1, sum(TOKENS), width, generator=torch.Generator().manual_seed(1)).bfloat16()


def test_windows_are_whole_stretches_and_change_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    made, layer = _made()
    x = _input(layer)
    found, windows = _computed(made, layer, x), []
    widened = bank_layers._in_stretches
    monkeypatch.setattr(bank_layers, "_in_stretches", lambda part, many: windows.append(widened(part, many)) or part)
    wanted = _computed(made, layer, x)
    for part in windows:
        assert part.window.start <= part.tokens.start and part.tokens.stop <= part.window.stop <= sum(TOKENS)
        assert (part.window.stop - part.window.start) % STRETCH == 0
    assert len({part.window.stop - part.window.start for part in windows}) == 2
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


def test_infinities_of_a_member_stay_with_it() -> None:
    made, layer = _made()
    x = _input(layer)
    wanted = _computed(made, layer, x)
    stop = TOKENS[0] + TOKENS[1]
    x[:, TOKENS[0] : stop] = torch.inf
    output, x_grad, grads = _computed(made, layer, x)
    others = [token for token in range(sum(TOKENS)) if not TOKENS[0] <= token < stop]
    assert output[:, TOKENS[0] : stop].isfinite().logical_not().any()
    assert torch.equal(output[:, others], wanted[0][:, others])
    assert torch.equal(x_grad[:, others], wanted[1][:, others])
    of_others = [number for number in range(len(grads)) if number // 2 != 1]
    assert all(torch.equal(grads[number], wanted[2][number]) for number in of_others)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_that_cannot_be_flattened_are_one_product(dtype: torch.dtype) -> None:
    """The first token of padded rows, as an encoder's last block has it."""
    made, layer = _made()
    made.model.to(dtype)
    rows = [MemberRows(member, 2) for member in made.members]
    wide = torch.randn(2 * len(TOKENS), 5, layer.get_base_layer().in_features).to(dtype)  # type: ignore[operator]
    with made.route(rows, length=1):
        found, wanted = layer(wide[:, :1]), layer(wide[:, :1].clone())
    assert torch.equal(found, wanted)


MIXED = [
    Lora(rank=2, alpha=4),
    Lora(rank=8, alpha=4),
    Lora(rank=3, alpha=9, targets="attention"),
    Lora(rank=5, alpha=2, method="rslora"),
    Lora(rank=5, alpha=5),
]
"""Members of unequal ranks, scales and targets."""


def _grouped(kind: type[RowGroups] | None, dropout: float, packed: bool) -> tuple[list[Tensor], Bank, int]:
    """Outputs and gradients of unequal members, the bank, and the operators of a forward and backward pass."""
    configs = [each.model_copy(update={"dropout": dropout}) for each in MIXED]
    made = bank.attach(tiny("Llama", head="CausalLM").requires_grad_(False), configs, seeds=range(len(configs)))
    made._routing.grouping = lambda *_, **__: kind
    made.train()
    trained = [each for member in made.members for each in made.parameters_of(member).values()]
    for number, each in enumerate(trained):
        each.data += 0.1 * torch.randn(each.shape, generator=torch.Generator().manual_seed(number))
    many = (2, 1, 3, 2, 1)
    rows = [MemberRows(member, count, 5 * count) for member, count in zip(made.members, many, strict=True)]
    ids = torch.randint(64, (9, 5), generator=torch.Generator().manual_seed(0))
    draws = [RowDraw(7, 1, np.arange(count), np.full(count, 5), packed=packed) for count in many]
    inputs = {"input_ids": ids.view(1, -1) if packed else ids}
    if packed:
        inputs["position_ids"] = torch.arange(5).repeat(9)[None]
    with made.route(rows, length=None if packed else 5), drawing(draws, ids.device), Operators() as counted:
        logits = made.model(**inputs).logits
        grads = torch.autograd.grad(logits.square().sum(), trained)
    return [logits.detach(), *grads], made, counted.count


class Operators(TorchDispatchMode):
    """Counts operators that compute, as an accelerator launches kernels: a grouped product is one."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (func.is_view or {"empty", "_unsafe_view"} & {*func.name()[6:].split(".")})
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", [KernelGroups, PaddedGroups])
def test_grouped_products_are_those_of_each_member(kind: type[RowGroups], dropout: float, packed: bool) -> None:
    found, made, few = _grouped(kind, dropout, packed)
    wanted, _, many = _grouped(None, dropout, packed)
    assert made._routing._groups == {}, "nothing is kept beyond the batch"
    for one, other in zip(found, wanted, strict=True):
        assert other.any() and float((one - other).norm()) <= 1e-5 * float(other.norm())
    assert few < many
