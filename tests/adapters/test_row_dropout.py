"""Dropout by row: the same whoever computes beside, for every method that drops anything."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.conftest import tiny
from workbench import adapters
from workbench.adapters import METHODS
from workbench.adapters.banks import bank as banks
from workbench.adapters.banks.bank_layers import MemberRows
from workbench.adapters.row_dropout import RowDraw, RowDropout, drawing

ALIKE = {
    "alora": "computes as lora, at the tokens of an invocation: tests/adapters/updates/test_alora.py",
    "oft": "drops nothing",
    "eva": "computes as lora",
    "loftq": "computes as pissa, and needs quantised weights",
    "corda": "computes as pissa, and starts from data",
    "lora-ga": "computes as pissa, and starts from data",
}
DROPPING = sorted(name for name, config in METHODS.items() if "dropout" in config.model_fields and name not in ALIKE)
SMALL: dict[str, dict[str, Any]] = {
    "boft": {"block": 4},
    "miss": {"rank": 4},
    "super": {"rank": 4},
    "vera": {"rank": 4},
}
CPU = torch.device("cpu")


def _lengthened(ids_BL: Tensor, length: int) -> Tensor:
    return nn.functional.pad(ids_BL, (0, length - ids_BL.shape[1]))


def _layer(share: float, key: int = 5) -> RowDropout:
    layer = RowDropout(share)
    layer.register_buffer("layer_key", torch.tensor(key), persistent=False)
    return layer


def _rows(*rows: int, seed: int = 0, step: int = 3) -> RowDraw:
    return RowDraw(seed, step, np.array(rows))


@pytest.fixture(params=DROPPING)
def dropping(request: pytest.FixtureRequest) -> nn.Module:
    """A tiny model with an adapter that drops much and changes something."""
    model: PreTrainedModel = tiny("Llama", num_key_value_heads=4)
    settings = {"method": request.param, "dropout": 0.5, **SMALL.get(request.param, {})}
    attached = adapters.attach(model, METHODS[request.param].model_validate(settings), seed=0)
    torch.manual_seed(1)
    for parameter in attached.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.1)
    return attached.train()


def test_a_row_computes_the_same_alone_and_among_others(dropping: nn.Module) -> None:
    """Whatever it is padded to, and whatever else was drawn before."""
    ids_BL = torch.arange(3, 27).view(4, 6)
    with drawing([_rows(7, 2, 9, 4)], CPU):
        together = dropping(input_ids=ids_BL).logits
    torch.manual_seed(99)
    with drawing([_rows(9)], CPU):
        alone = dropping(input_ids=_lengthened(ids_BL[2:3], 9)).logits[:, :6]
    torch.testing.assert_close(alone[0], together[2], rtol=1e-5, atol=1e-5)
    dropping.eval()
    assert not torch.allclose(dropping(input_ids=ids_BL).logits, together, atol=1e-3)


@pytest.mark.nightly(but=["adalora", "boft", "houlsby", "lora", "miss", "pissa", "randlora", "vera"])
def test_each_step_and_seed_drops_something_else(dropping: nn.Module) -> None:
    ids_BL = torch.arange(3, 27).view(4, 6)
    found = []
    for draw in (_rows(0, 1, 2, 3), _rows(0, 1, 2, 3, step=4), _rows(0, 1, 2, 3, seed=1)):
        with drawing([draw], CPU):
            found.append(dropping(input_ids=ids_BL).logits)
    assert not any(torch.allclose(found[a], found[b], atol=1e-3) for a, b in ((0, 1), (0, 2), (1, 2)))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_masks_are_as_random_as_coins(share: float) -> None:
    """The share that is dropped, and how often neighbours among rows, tokens, units and layers agree."""
    ones_BTI = torch.ones(32, 64, 128)
    with drawing([_rows(*range(32))], CPU):
        kept, other = (_layer(share, key)(ones_BTI) != 0 for key in (5, 6))
    assert (~kept).float().mean().item() == pytest.approx(share, abs=0.003)
    agree = share**2 + (1 - share) ** 2
    for one, two in (
        (kept[1:], kept[:-1]),
        (kept[:, 1:], kept[:, :-1]),
        (kept[..., 1:], kept[..., :-1]),
        (kept, other),
    ):
        assert (one == two).float().mean().item() == pytest.approx(agree, abs=0.005)
    for dimensions in ((0, 1), (0, 2), (1, 2)):
        counts = kept.float().mean(dimensions)
        wanted = (share * (1 - share) / (kept.numel() / len(counts))) ** 0.5
        assert counts.std().item() == pytest.approx(wanted, rel=0.5)


def test_the_mean_stays_and_flat_tokens_are_those_of_their_rows() -> None:
    x_BTI, layer = torch.rand(3, 50, 200), _layer(0.25)
    with drawing([_rows(4, 1, 3)], CPU):
        found = layer(x_BTI)
        assert torch.equal(layer(x_BTI.flatten(0, 1)), found.flatten(0, 1))
    assert found.mean().item() == pytest.approx(x_BTI.mean().item(), rel=0.02)
    assert torch.equal(found[found != 0], (x_BTI * (1 / 0.75))[found != 0])


def test_members_of_a_bank_that_read_the_same_rows_drop_the_same_as_alone(llama: PreTrainedModel) -> None:
    """As peers do that teach each other: every member reads every row, in one forward pass."""
    config = METHODS["lora"].model_validate({"method": "lora", "rank": 4, "dropout": 0.5})
    bank = banks.attach(llama, [config, config], seeds=[0, 1])
    torch.manual_seed(1)
    for parameter in (each for member in bank.members for each in bank.parameters_of(member).values()):
        nn.init.normal_(parameter, std=0.1)
    bank.train()
    ids_BL = torch.arange(3, 27).view(4, 6)
    with drawing([_rows(7, 2, 9, 4)], CPU), bank.route([MemberRows(each, 4) for each in bank.members], length=6):
        together = bank.model(input_ids=torch.cat([ids_BL, ids_BL])).logits
    for number, member in enumerate(bank.members):
        with drawing([_rows(9, 4)], CPU), bank.route([MemberRows(member, 2)], length=6):
            alone = bank.model(input_ids=ids_BL[2:]).logits
        torch.testing.assert_close(alone, together[4 * number + 2 : 4 * number + 4], rtol=1e-5, atol=1e-5)
