"""Seconds that devices wait for each other, against bytes counted message by message."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.config.sections.distributed_config import DistributedConfig
from workbench.planning import sharded_memory
from workbench.planning.sharded_memory import Contents, Rates

COUNT = 24_000
CONTENTS = Contents(trained=(COUNT,), element=4)
LINK_ALONE = Rates(flops=1.0, link=1.0, host=1.0, update=1.0, disk=1.0)


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
