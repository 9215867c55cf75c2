"""What each device holds under FSDP2: shares of everything, and whole what computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from workbench.config.sections.distributed_config import DistributedConfig
from workbench.planning import sharded_memory
from workbench.planning.sharded_memory import GATHERED, GRADIENTS, MASTERS, MOMENTS, OPTIMIZER, Contents

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
