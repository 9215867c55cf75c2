"""What gradient exchanges of several processes keep and count; processes that talk are in `test_compression.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from workbench.config import RunConfig
from workbench.runs.ranks import ALONE, Ranks, buckets
from workbench.training.distributed.gradient_exchange import GradientExchange
from workbench.training.distributed.wire import ring_bytes
from workbench.training.master_weights import MasterWeights
from workbench.training.optim.onebit_adam import OneBitAdamW

COUNT = 6 * 5 + 5


def exchange(ranks: Ranks, bucket_bytes: int = 1000, **compression: Any) -> GradientExchange:
    distributed = {"bucket_bytes": bucket_bytes, "compression": compression}
    config = {"recipe": "sft", "data": {"train": "rows.jsonl"}, "distributed": distributed}
    return GradientExchange(RunConfig.model_validate(config), MasterWeights(nn.Linear(6, 5), torch.float32), ranks)


def state(processes: int, kind: str = "int8") -> dict[str, torch.Tensor]:
    """Of a checkpoint."""
    waiting_WN = torch.randn(processes + 1, COUNT, generator=torch.Generator().manual_seed(processes))
    names = [*(f"{kind} process {rank}" for rank in range(processes)), f"{kind} sum"]
    return dict(zip(names, waiting_WN, strict=True))


def resume(found: GradientExchange, bucket_bytes: int) -> None:
    """As the first step that is compressed does."""
    found._make_sums(buckets([*found._masters], bucket_bytes))


def waiting(exchanges: list[GradientExchange]) -> torch.Tensor:
    """What waits in all of them, together."""
    by_bucket = list(zip(*(each._sums for each in exchanges), strict=True))
    own = [torch.stack([each.waiting_N[: each.count] for each in same]).sum(0) for same in by_bucket]
    shards = [torch.cat([each.waiting_S for each in same])[: same[0].count] for same in by_bucket]
    return torch.cat(own) + torch.cat(shards)


@pytest.mark.parametrize("others", [2, 3])
@pytest.mark.parametrize("bucket_bytes", [10, 1000])
def test_nothing_that_waits_is_lost_among_other_processes_or_buckets(others: int, bucket_bytes: int) -> None:
    saved = state(2)
    exchanges = [exchange(Ranks(rank, others), bucket_bytes, gradients="int8", block=8) for rank in range(others)]
    for each in exchanges:
        each.load(saved)
        assert each.state() == saved  # until the first step
        resume(each, bucket_bytes)
    torch.testing.assert_close(waiting(exchanges), torch.stack([*saved.values()]).sum(0))
    if others == 2:
        own = torch.cat([each.waiting_N[: each.count] for each in exchanges[1]._sums])
        assert torch.equal(own, saved["int8 process 1"])


@pytest.mark.parametrize("saved", [{}, state(2, "onebit")])
def test_another_kind_or_none_leaves_it_out(saved: dict[str, torch.Tensor]) -> None:
    found = exchange(Ranks(0, 2), gradients="int8")
    found.load(saved)
    resume(found, 1000)
    assert not any(each.waiting_N.any() or each.waiting_S.any() for each in found._sums)


def test_off_it_keeps_and_tells_nothing() -> None:
    assert exchange(Ranks(0, 2)).hooks == {} and exchange(Ranks(0, 2)).metrics == {}


@pytest.mark.parametrize(("ranks", "compresses"), [(ALONE, False), (Ranks(1, 2), True)])
def test_the_warm_up_is_over_after_as_many_steps(ranks: Ranks, compresses: bool) -> None:
    found = exchange(ranks, gradients="onebit", warm_up=3)
    optimizer = OneBitAdamW([nn.Parameter(torch.zeros(1))])
    frozen = []
    for step in range(5):
        found.begin(step, optimizer)
        frozen.append(optimizer.frozen)
    assert frozen == [False] * 3 + [compresses] * 2


@pytest.mark.parametrize("world", [2, 3, 8])
def test_a_ring_sends_all_but_a_share_twice(world: int) -> None:
    assert ring_bytes(24 * world, world) == 2 * (world - 1) * 24
