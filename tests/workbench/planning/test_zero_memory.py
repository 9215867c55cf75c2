"""What each device holds: the paper's table, and what must be true of any model."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.config.sections.distributed_config import DistributedConfig
from workbench.planning import sharded_memory
from workbench.planning.sharded_memory import Contents

PAPER = Contents(trained=(7_500_000_000,), element=2, gradient=2)
"""7.5 B parameters, Adam, mixed precision."""
ADAPTER = Contents(trained=(4096, 2048, 33), element=4, frozen=((1_000_000, 2_000_000), (640, 2560)), whole=100)


def on(stage: int, **settings: Any) -> DistributedConfig:
    return DistributedConfig.model_validate({"zero": stage, **settings})


def model_states(contents: Contents, *, devices: int, stage: int) -> int:
    """Bytes of weights, gradients, masters and optimizer state on one of so many devices, as the paper counts them."""
    count, masters = contents.trainable, 4 if contents.mixed else 0
    cut = [1 if stage < first else devices for first in (3, 2, 1)]
    sizes = (contents.weight_bytes, contents.gradient * count, (masters + contents.optimizer) * count)
    return round(sum(size / parts for size, parts in zip(sizes, cut, strict=True)))


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_table_of_the_paper(stage: int, gigabytes: float) -> None:
    found = model_states(PAPER, devices=64, stage=stage)
    assert round(found / 1e9, 1) == gigabytes


@pytest.mark.parametrize("contents", [PAPER, ADAPTER])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_holds_what_the_paper_counts_and_more(contents: Contents, stage: int) -> None:
    counted = model_states(contents, devices=8, stage=stage)
    held = sharded_memory.states(contents, on(stage), devices=8, passes=2).device
    assert counted - contents.whole <= sum(held.values())
    whole = sharded_memory.states(contents, on(0), devices=8).device
    if stage:
        assert held[sharded_memory.OPTIMIZER] * 8 == pytest.approx(whole[sharded_memory.OPTIMIZER], rel=0.01)


def test_shares_cover_everything_and_pad_little() -> None:
    for devices in (1, 2, 3, 7):
        for stage in (1, 2, 3):
            covered = devices * sharded_memory.shares(ADAPTER, devices=devices, stage=stage)
            assert 0 <= covered - ADAPTER.trainable < 2 * devices * len(ADAPTER.trained)


def test_what_is_offloaded_leaves_the_device(tmp_path: Any) -> None:
    whole = sharded_memory.states(PAPER, on(3), devices=4)
    cpu = sharded_memory.states(PAPER, on(3, offload_optimizer="cpu", offload_parameters="cpu"), devices=4)
    nvme = sharded_memory.states(
        PAPER, on(3, offload_optimizer="nvme", offload_parameters="nvme", nvme=tmp_path), devices=4
    )
    assert not {sharded_memory.MASTERS, sharded_memory.OPTIMIZER, sharded_memory.GRADIENTS} & cpu.device.keys()
    for name in (sharded_memory.MASTERS, sharded_memory.OPTIMIZER, sharded_memory.WEIGHTS):
        assert whole.device[name] == cpu.host[name] == nvme.disk[name]
    assert sum(nvme.host.values()) < sum(cpu.host.values()) or nvme.host[sharded_memory.OPTIMIZER]
    assert cpu.device.keys() == {sharded_memory.BUCKETS, sharded_memory.GATHERED}, (
        "no parameter of this model is kept whole"
    )
