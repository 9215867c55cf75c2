"""What each device holds: the paper's table, and what must be true of any model.

What each device holds under FSDP2: shares of everything, and whole what computes.
Seconds that devices wait for each other, against bytes counted message by message.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from workbench.config.sections.distributed_config import DistributedConfig
from workbench.planning import sharded_memory
from workbench.planning.sharded_memory import GATHERED, GRADIENTS, MASTERS, MOMENTS, OPTIMIZER, Contents, Rates

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


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_estimators_of_other_tools_say_the_same_of_what_they_count(devices: int) -> None:
    from accelerate.commands.estimate import estimate_training_usage
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    contents = replace(PAPER, gradient=4)  # micro-batches add up in float32
    count = contents.trainable
    usage = estimate_training_usage(4 * count, "bfloat16")
    alone = sum(sharded_memory.states(contents, on(0), devices=1, passes=2).device.values())
    assert alone == pytest.approx(usage["model"] + usage["optimizer"] + usage["gradients"], rel=1e-3)
    moments = [sharded_memory.states(contents, on(2), devices=devices, moment=each, passes=2) for each in MOMENTS]
    _, theirs = estimate_zero2_model_states_mem_needs(count, devices, cpu_offload=False)
    assert max(sum(each.device.values()) for each in moments) == pytest.approx(theirs, rel=0.01)


def test_a_tensor_above_what_may_be_whole_at_once_is_whole_all_the_same() -> None:
    embedding, layer = 525_336_576, 58_720_256  # of an 8B
    for own in (Contents((embedding, layer), 2), Contents((layer,), 2, frozen=((embedding, 2 * embedding),))):
        held = sharded_memory.states(own, on(3), devices=8, moment="forward").device[GATHERED]
        assert held == 2 * embedding
    every = Contents((layer,) * 9, 2)
    held = sharded_memory.states(every, on(3), devices=8, moment="forward").device[GATHERED]
    assert held == 2 * sharded_memory.LIVE


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


MODEL = Contents(trained=(4096,) * 6, element=4, blocks=((4 * 8192, 8192), (4 * 8192, 8192)))
"""Two blocks of two parameters each, and two outside of them."""


def held(zero: int, devices: int = 4, moment: Any = "forward", **settings: Any) -> dict[str, int]:
    how = DistributedConfig.model_validate({"engine": "fsdp2", "zero": zero, **settings})
    return sharded_memory.states(MODEL, how, devices=devices, moment=moment, passes=2).device


def test_shares_of_all_devices_are_the_whole() -> None:
    found = held(3)
    assert {name: 4 * found[name] for name in (MASTERS, OPTIMIZER, GRADIENTS)} == {
        MASTERS: 4 * 6 * 4096,
        OPTIMIZER: 8 * 6 * 4096,
        GRADIENTS: 4 * 6 * 4096,
    }


def test_what_is_outside_of_blocks_is_whole_and_with_stage_2_all_is() -> None:
    outside, block = 4 * 8192, 4 * 8192
    assert held(3)[GATHERED] == outside + block
    assert held(2)[GATHERED] == outside + block + 2 * block
    assert GATHERED not in held(3, moment="step")


@pytest.mark.parametrize("moment", MOMENTS)
def test_copies_hold_what_fewer_devices_would(moment: str) -> None:
    assert held(3, devices=8, replicas=2, moment=moment) == held(3, devices=4, moment=moment)


def test_gradients_of_whole_adapters_wait_where_a_step_has_several_passes() -> None:
    bank = replace(MODEL, apart=True)
    how = DistributedConfig.model_validate({"engine": "fsdp2", "zero": 3})
    one, two = (
        sharded_memory.states(bank, how, devices=2, moment="forward", passes=passes).device for passes in (1, 2)
    )
    assert GRADIENTS not in one and two == {**one, GRADIENTS: 4 * 6 * 4096}


COUNT = 24_000
CONTENTS = Contents(trained=(COUNT,), element=4)
LINK_ALONE = Rates(link=1.0, host=1.0, update=1.0, disk=1.0)


def sent(devices: int, passes: int, **settings: Any) -> float:
    """Bytes that a device sends in a step."""
    how = DistributedConfig.model_validate(settings)
    return sharded_memory.waiting_seconds(CONTENTS, how, LINK_ALONE, devices=devices, passes=passes)


def ring(devices: int, count: int, *, gathers: int, reduces: int) -> float:
    """Bytes that each device of a ring sends: all but its own share, in turn, for each gathering or reducing."""
    steps = (gathers + reduces) * (devices - 1)
    return float(steps * 4 * count / devices)


def test_devices_that_hold_everything_add_gradients_once_a_step() -> None:
    assert sent(4, 3, zero=0) == ring(4, COUNT, gathers=1, reduces=1)


@pytest.mark.parametrize("zero", [2, 3])
def test_shares_are_gathered_and_reduced_in_every_pass(zero: int) -> None:
    whole = 3 * ring(4, COUNT, gathers=zero - 1, reduces=1)
    assert sent(4, 3, zero=zero, engine="fsdp2") == pytest.approx(whole)


@pytest.mark.parametrize(("devices", "replicas"), [(8, 2), (8, 4), (12, 3)])
def test_copies_send_each_other_their_shares_of_gradients_alone(devices: int, replicas: int) -> None:
    group = devices // replicas
    within = ring(group, COUNT, gathers=2, reduces=1)
    between = ring(replicas, COUNT // group, gathers=1, reduces=1)
    assert sent(devices, 3, zero=3, engine="fsdp2", replicas=replicas) == pytest.approx(3 * (within + between))


@pytest.mark.parametrize("layout", [{}, {"zero": 2, "engine": "fsdp2"}])
def test_gradients_in_half_precision_take_half_the_time(layout: dict[str, Any]) -> None:
    whole, coded = (sent(4, 3, **layout, compression={"gradients": kind}) for kind in ("none", "bfloat16"))
    weights = 3 * ring(4, COUNT, gathers=1, reduces=0) if layout else 0
    assert coded - weights == pytest.approx((whole - weights) / 2)


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("way", ["tensor", "pipeline"])
def test_groups_that_deal_blocks_add_their_parts_of_gradients_alone(groups: int, way: str) -> None:
    assert sent(2 * groups, 3, **{way: 2}) == pytest.approx(ring(groups, COUNT, gathers=1, reduces=1))
