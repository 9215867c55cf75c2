from __future__ import annotations

import pytest
import torch

from workbench.runs import ranks as module
from workbench.runs.ranks import ALONE, Ranks, joined


def test_without_a_launcher_a_process_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert joined() is ALONE and ALONE.alone and ALONE.first


def test_alone_everything_is_its_own() -> None:
    tensor = torch.arange(3.0)
    ALONE.add_up([tensor], bucket_bytes=1)
    ALONE.wait()
    assert tensor.tolist() == [0, 1, 2]
    assert ALONE.agreed("x") == "x" and ALONE.gathered("x") == ["x"]
    assert ALONE.any(True) and not ALONE.any(False)


def test_buckets_hold_neighbours_of_one_precision() -> None:
    tensors = [torch.zeros(4), torch.zeros(4), torch.zeros(9), torch.zeros(2, dtype=torch.float64), torch.zeros(1)]
    sizes = [[tensor.numel() for tensor in bucket] for bucket in module.buckets(tensors, 32)]
    assert sizes == [[4, 4], [9], [2], [1]]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_shares_are_disjoint_and_put_together_in_order(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    members = list(range(5))
    shares = [Ranks(rank, world).share(members) for rank in range(world)]
    assert sorted(number for share in shares for number in share) == members
    monkeypatch.setattr(Ranks, "gathered", lambda _, gathered: shares)
    assert Ranks(0, world).collected(shares[0]) == members
