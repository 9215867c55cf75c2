"""Float32 masters: gradients add up in float32, and what is saved is the master."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import pytest
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


def test_what_came_in_half_precision_is_saved_in_it() -> None:
    model = nn.Linear(4, 4, bias=False).bfloat16()
    masters = MasterWeights(model, torch.bfloat16)
    for master in masters:
        master.data += 0.25
    with masters.exposed():
        (master,) = masters
        assert model.weight.dtype == torch.bfloat16 and torch.equal(model.weight, master.bfloat16())


def _anonymous() -> int:
    """Bytes of this process that no file holds, without what the allocator keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [each for each in lines if each.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="counts what Linux counts")
def test_masters_of_what_is_frozen_take_no_memory(tmp_path: Path) -> None:
    """Of 12 layers with 8 MiB of masters each, two train at a time; their values come back to the bit."""
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(2048, 1024, bias=False) for _ in range(12)]).bfloat16()
    model.to_empty(device="cpu")
    names = dict(model.named_parameters())
    for number, parameter in enumerate(names.values()):
        nn.init.constant_(parameter, number)
    before, one = _anonymous(), 2048 * 1024 * 4
    masters = MasterWeights(model, torch.bfloat16, frozen=list(names)[2:], folder=tmp_path / "evicted")
    for first in (0, 4, 8, 0):
        training = list(names)[first : first + 2]
        masters.follow([name for name in names if name not in training])
        with torch.no_grad():
            for name in training:
                masters.named()[name].add_(2**-12)
        masters.refresh()
        assert _anonymous() - before < 6 * one
    assert [float(each.detach()[0, 0]) for each in masters] == [
        number + 2**-12 * {0: 2, 1: 2, 4: 1, 5: 1, 8: 1, 9: 1}.get(number, 0) for number in range(12)
    ]
    assert not list((tmp_path / "evicted").iterdir())


def test_a_value_that_is_set_while_it_is_frozen_computes(tmp_path: Path) -> None:
    model = nn.Linear(4, 4, bias=False)
    masters = MasterWeights(model, torch.bfloat16, frozen=["weight"], folder=tmp_path)
    (master,) = masters
    with torch.no_grad():
        master.copy_(torch.full((4, 4), 1.0001))  # as a resume does
    masters.refresh()
    assert torch.equal(model.weight, torch.ones(4, 4, dtype=torch.bfloat16))
    masters.follow([])
    assert torch.equal(master, torch.full((4, 4), 1.0001))
