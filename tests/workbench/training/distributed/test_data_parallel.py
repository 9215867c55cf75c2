"""Rows of a step dealt to processes, those of a bank too, and waiting for other processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.workbench.training.together import section
from workbench.config.sections.distributed_config import DistributedConfig
from workbench.data.packing import PACKED, PADDED, RowLayout, mixed_batches
from workbench.errors import Stopped
from workbench.runs.ranks import Ranks
from workbench.training import bank_trainer
from workbench.training.distributed import data_parallel
from workbench.training.distributed.data_parallel import BankShares, share_rows


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    tokens=st.integers(60, 300),
    world=st.integers(1, 5),
    in_step=st.booleans(),
    form=st.sampled_from([PADDED, PACKED]),
)
@settings(max_examples=200, deadline=None)
def test_each_row_is_one_process_own_and_nobody_waits_for_long(
    lengths: list[int], tokens: int, world: int, in_step: bool, form: RowLayout
) -> None:
    known, rows = np.array(lengths), np.arange(len(lengths))
    dealt = [
        share_rows(rows, known, form, tokens=tokens, ranks=Ranks(rank, world), in_step=in_step) for rank in range(world)
    ]
    counted = [part.rows for own in dealt for part in own if part.counts]
    assert sorted(np.concatenate(counted)) == list(rows)
    assert all(form.tokens(known[part]) <= tokens for part in counted)
    passes = [len(own) for own in dealt]
    assert max(passes) - min(passes) <= (0 if in_step else 1)
    if len(rows) >= world:
        assert all(any(part.counts for part in own) for own in dealt)


def test_it_waits_until_others_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    callback: Any = SimpleNamespace(stop_requested=lambda: False)
    data_parallel.wait_for_ranks(lambda: len(slept) == 3, callback)
    assert slept == [data_parallel.LOOK] * 3


def test_who_waits_can_be_asked_to_stop() -> None:
    callback: Any = SimpleNamespace(stop_requested=lambda: True)
    data_parallel.wait_for_ranks(lambda: True, callback)
    with pytest.raises(Stopped, match="while other processes train"):
        data_parallel.wait_for_ranks(lambda: False, callback)


@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    tokens=st.integers(60, 300),
    world=st.integers(1, 4),
    form=st.sampled_from([PADDED, PACKED]),
    padded=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_each_row_counts_once_and_all_processes_pass_as_often(
    sizes: list[int], tokens: int, world: int, form: RowLayout, padded: bool
) -> None:
    draw = np.random.default_rng(sum(sizes))
    lengths = [draw.choice([7, 20, 55], size) for size in sizes]
    batches = [draw.permutation(size) for size in sizes]
    dealt = []
    for rank in range(world):
        shares = BankShares(nn.Linear(1, 1), DistributedConfig(), Ranks(rank, world))

        def cut(rows: np.ndarray, long: np.ndarray, own: BankShares = shares) -> object:
            return own.cut(rows, long, form, tokens=tokens)

        dealt.append(list(mixed_batches(batches, lengths, cut=cut, padded=padded)))  # type: ignore[arg-type]
    assert len({len(own) for own in dealt}) == 1
    parts = [part for own in dealt for micro_batch in own for part in micro_batch]
    counted = sorted((part.owner, int(row)) for part in parts if part.counts for row in part.indices)
    assert counted == [(owner, row) for owner, size in enumerate(sizes) for row in range(size)]


@pytest.mark.parametrize(
    ("distributed", "method", "reason"),
    [
        ({}, "lora", None),
        ({"engine": "fsdp2", "zero": 3}, "lora", None),
        ({"engine": "fsdp2", "zero": 2}, "rslora", None),
        ({"engine": "fsdp2", "zero": 3}, "ia3", "adapter.method: ia3 in a bank needs weights that are whole"),
        ({"zero": 3}, "lora", "distributed.engine: DeepSpeed steps one optimizer"),
        (
            {"engine": "fsdp2", "zero": 3, "offload_parameters": "cpu", "offload_optimizer": "cpu"},
            "lora",
            "distributed.offload_parameters",
        ),
    ],
)
def test_a_bank_over_shares_or_the_reason_against_it(
    distributed: dict[str, object], method: str, reason: str | None
) -> None:
    config = section(adapter={"method": method})
    config = config.model_copy(update={"distributed": DistributedConfig.model_validate(distributed)})
    found = bank_trainer.refusal(config)
    assert found is None if reason is None else found is not None and found.startswith(reason)
