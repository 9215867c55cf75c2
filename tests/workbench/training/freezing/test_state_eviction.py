"""What is evicted comes back to the bit, whatever is evicted and fetched in between."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from workbench.training.optim.optimizer_states import EvictedStates


def _tensors(name: str, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{name}|exp_avg": torch.randn(3, 5, generator=generator).T,  # in columns
        f"{name}|step": torch.tensor(float(seed)),
        f"{name}|state1": torch.randint(0, 256, (7,), generator=generator, dtype=torch.uint8),
    }


def test_any_order_of_going_and_coming_returns_every_bit(tmp_path: Path) -> None:
    chance, evicted = np.random.default_rng(0), EvictedStates(tmp_path / "evicted")
    away: dict[str, dict[str, Tensor]] = {}
    for number in range(60):
        name = f"block.{chance.integers(6)}.weight"
        if name in away:
            wanted, found = away.pop(name), evicted.pop(name)
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[key], wanted[key]) for key in wanted)
            assert all(found[key].dtype == wanted[key].dtype for key in wanted)
        else:
            away[name] = _tensors(name, number)
            evicted.put(name, away[name])
        assert all((f"block.{block}.weight" in evicted) == (f"block.{block}.weight" in away) for block in range(6))
        state = evicted.state()
        assert set(state) == {key for tensors in away.values() for key in tensors}
        assert all(torch.equal(state[key], each) for tensors in away.values() for key, each in tensors.items())
        assert len([*(tmp_path / "evicted").iterdir()]) == len(away), "what came back is not left behind"


def test_to_forget_leaves_nothing_on_disk_and_goes_on(tmp_path: Path) -> None:
    evicted = EvictedStates(tmp_path / "evicted")
    evicted.clear()
    evicted.put("a", _tensors("a", 1))
    evicted.clear()
    assert "a" not in evicted and evicted.state() == {} and not (tmp_path / "evicted").exists()
    evicted.put("a", _tensors("a", 2))
    assert evicted.pop("a")["a|step"] == 2.0


def test_what_a_killed_process_left_is_not_taken_for_ones_own(tmp_path: Path) -> None:
    EvictedStates(tmp_path / "evicted").put("a", _tensors("a", 1))
    evicted = EvictedStates(tmp_path / "evicted")
    assert "a" not in evicted and evicted.state() == {}
    evicted.put("a", _tensors("a", 2))
    assert evicted.pop("a")["a|step"] == 2.0
