"""Sums of several processes in one: their messages are handed over here."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workbench.runs.ranks import Ranks
from workbench.training.distributed.block_codes import BlockCode, Kind
from workbench.training.distributed.compressed_sum import CompressedSum


def group(count: int, world: int, kind: Kind) -> list[CompressedSum]:
    code = BlockCode(kind, 8)
    return [CompressedSum(count, code, Ranks(rank, world), torch.device("cpu")) for rank in range(world)]


def summed(processes: list[CompressedSum], vectors: list[Tensor]) -> Tensor:
    """What all of them get, by what one sends the others."""
    sent = [process.codes([vector[:3], vector[3:]]) for process, vector in zip(processes, vectors, strict=True)]
    shards = [process.shard_codes(torch.stack([each[at] for each in sent])) for at, process in enumerate(processes)]
    found = [process.decoded(torch.stack(shards)) for process in processes]
    assert all(torch.equal(each, found[0]) for each in found)
    return found[0]


def waiting(processes: list[CompressedSum]) -> Tensor:
    """What has not come through yet, of all of them."""
    count = processes[0].count
    own = sum((process.waiting_N[:count] for process in processes), torch.zeros(count))
    return own + torch.cat([process.waiting_S for process in processes])[:count]


kinds = st.sampled_from(["int8", "onebit"])


@given(count=st.integers(4, 70), world=st.integers(1, 4), kind=kinds, steps=st.integers(1, 12), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_nothing_is_lost(count: int, world: int, kind: Kind, steps: int, seed: int) -> None:
    """All sums, with what waits, are all vectors."""
    processes, draws = group(count, world, kind), torch.Generator().manual_seed(seed)
    given_, applied = torch.zeros(count), torch.zeros(count)
    for _ in range(steps):
        vectors = [torch.randn(count, generator=draws) for _ in range(world)]
        given_ += torch.stack(vectors).sum(0)
        applied += summed(processes, vectors)
    torch.testing.assert_close(applied + waiting(processes), given_, rtol=0, atol=1e-4)
    for process in processes:  # what pads a vector never counts
        assert not process.waiting_N[count:].any() and not process.waiting_S[process._own :].any()


@pytest.mark.parametrize("kind", ["int8", "onebit"])
def test_a_constant_vector_comes_through(kind: Kind) -> None:
    """The mean of sums goes to the vector as 1 / steps, however few bits a sum has: what waits does not grow."""
    vectors = list(torch.randn(2, 40, generator=torch.Generator().manual_seed(0)))
    processes, wanted = group(40, 2, kind), vectors[0] + vectors[1]
    found = torch.stack([summed(processes, vectors) for _ in range(200)])
    assert (found.mean(0) - wanted).abs().max() < 0.05 * wanted.abs().max()
    assert (found[0] - wanted).abs().max() > 0


def test_bytes_sent_are_those_of_a_ring() -> None:
    """Each process sends all others a shard of codes, twice."""
    (first, *_) = group(64, 4, "int8")
    assert first.sent_bytes == 2 * 3 * (16 + 2 * 4)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", ["int8", "onebit"])
def test_what_waits_can_be_set(world: int, kind: Kind) -> None:
    """Processes that are given what waited in others get the same bits from then on."""
    count, draws = 50, torch.Generator().manual_seed(world)
    processes, vectors = group(count, world, kind), list(torch.randn(world, count, generator=draws))
    summed(processes, vectors)
    sums = torch.cat([process.waiting_S for process in processes])[:count]
    others = group(count, world, kind)
    for process, other in zip(processes, others, strict=True):
        other.load(process.waiting_N[:count].clone(), sums)
    assert torch.equal(summed(others, vectors), summed(processes, vectors))
