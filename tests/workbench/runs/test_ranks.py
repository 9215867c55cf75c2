from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from workbench.errors import TrainingError
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


def _in_two(store: Path, work: Callable[[Ranks], Any]) -> list[Any]:
    """What each of two processes over gloo answers, by rank: the value, or its error."""
    context = multiprocessing.get_context("fork")
    queue: Any = context.Queue()

    def one(rank: int) -> None:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        try:
            queue.put((rank, work(Ranks(rank, 2))))
        except TrainingError as error:
            queue.put((rank, error))

    processes = [context.Process(target=one, args=(rank,), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    found = dict(queue.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(30)
    return [found[0], found[1]]


def test_processes_that_meet_exchange_their_values(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> Any:
        ranks.wait()
        return ranks.agreed(ranks.rank + 5), ranks.gathered(ranks.rank), ranks.any(ranks.rank == 1)

    assert _in_two(tmp_path / "store", work) == [(5, [0, 1], True)] * 2


@pytest.mark.parametrize("other", ["agreed", "gathered", "wait"])
def test_processes_at_different_lines_are_told_at_once(tmp_path: Path, other: str) -> None:
    """They would wait for a day, or take a value for another."""

    def work(ranks: Ranks) -> Any:
        if ranks.first:
            return ranks.gathered("sizes")
        return {"agreed": lambda: ranks.agreed(1), "gathered": lambda: ranks.gathered(2), "wait": ranks.wait}[other]()

    for error in _in_two(tmp_path / "store", work):
        assert isinstance(error, TrainingError)
        assert "process 0 to tests.workbench.runs.test_ranks, line" in str(error) and "; process 1 to" in str(error)
