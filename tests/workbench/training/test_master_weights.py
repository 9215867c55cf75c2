"""Float32 masters: gradients add up in float32, and what is saved is the master."""

from __future__ import annotations

import torch
from torch import nn

from workbench.training.master_weights import MasterWeights


def test_float32_parameters_are_their_own_masters() -> None:
    model = nn.Linear(3, 2)
    assert {id(p) for p in MasterWeights(model, torch.float32)} == {id(p) for p in model.parameters()}


def test_bfloat16_gradients_add_up_in_float32() -> None:
    model = nn.Linear(1, 1, bias=False)
    masters = MasterWeights(model, torch.bfloat16)
    (master,) = masters
    assert model.weight.dtype == torch.bfloat16 and master.dtype == torch.float32
    for value in (256.0, 1.0, 1.0):  # bfloat16 holds 8 bits: 256 + 1 is 256 there
        model(torch.full((1, 1), value, dtype=torch.bfloat16)).sum().backward()
    assert model.weight.grad is None
    assert master.grad is not None and master.grad.item() == 258.0


def test_small_updates_survive_in_the_masters_and_in_what_is_saved() -> None:
    model = nn.Linear(4, 4, bias=False)
    nn.init.ones_(model.weight)
    masters = MasterWeights(model, torch.bfloat16)
    for master in masters:
        master.data += 1e-4
    masters.refresh()
    assert torch.equal(model.weight, torch.ones(4, 4, dtype=torch.bfloat16))
    with masters.exposed():
        saved = model.state_dict()["weight"].clone()
    assert saved.dtype == torch.float32 and torch.allclose(saved, torch.full((4, 4), 1.0001))
    assert model.weight.dtype == torch.bfloat16
