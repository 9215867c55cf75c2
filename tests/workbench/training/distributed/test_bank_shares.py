"""Rows of a bank's members dealt to processes, and what keeps these from training them together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.workbench.training.together import section
from workbench.config.sections.distributed_config import DistributedConfig
from workbench.data.packing import PACKED, PADDED, RowLayout, mixed_batches
from workbench.runs.ranks import Ranks
from workbench.training import bank_trainer
from workbench.training.distributed.bank_shares import BankShares


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
