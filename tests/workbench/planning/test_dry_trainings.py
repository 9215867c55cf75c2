"""Steps that stand for all of a run: what is due in them, and their mean work."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from workbench.config import RunConfig
from workbench.planning.dry_trainings import step_kinds


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({"recipe": "sft", "data": {"train": "x.jsonl"}, **sections})


def test_a_plain_run_has_one_kind_of_step() -> None:
    assert step_kinds(config(), steps=100, blocks=8) == {0: 1.0}


def test_what_is_due_in_some_steps_happens_as_often_as_it_does() -> None:
    found = step_kinds(config(optimizer={"sam": 0.05, "sam_every": 4}), steps=100, blocks=8)
    assert found == {0: 0.25, 1: 0.75}
    both = step_kinds(config(optimizer={"sam": 0.05, "sam_every": 2, "noise_scale": 3}), steps=600, blocks=8)
    assert both == pytest.approx({0: 1 / 6, 1: 1 / 3, 2: 1 / 3, 3: 1 / 6})
    curved = step_kinds(config(optimizer={"name": "sophia", "curvature_every": 5}), steps=100, blocks=8)
    assert curved == pytest.approx({0: 0.2, 1: 0.8})
    assert step_kinds(config(optimizer={"name": "shampoo", "curvature_every": 5}), steps=100, blocks=8) == {0: 1.0}


@pytest.mark.parametrize("blocks", [1, 2, 3, 6])
def test_the_steps_before_and_after_a_stacking_have_their_shares(blocks: int) -> None:
    """Also in a backbone that is cut down for timing, whose blocks cannot be halved."""
    growing = config(adapter={"method": "full"}, grow={"at": [0.25]})
    found = step_kinds(growing, steps=1000, blocks=blocks)
    depths = {step: growing.grow.depth(step, step / 1000, blocks=blocks) for step in found}
    assert sum(found.values()) == pytest.approx(1) and max(depths.values()) == blocks
    assert sum(share * depths[step] for step, share in found.items()) == pytest.approx(0.875 * blocks, rel=2e-3)


@pytest.mark.parametrize("ramp", [None, 5.0])
def test_two_steps_do_the_mean_work_of_all_and_one_of_them_the_most(ramp: float | None) -> None:
    drop = config(layer_drop={"rate": 0.5, "ramp": ramp}, optimizer={"sam": 0.05, "sam_every": 2})
    found = step_kinds(drop, steps=300, blocks=6)

    def kept(step: int) -> int:
        return 6 - sum(drop.layer_drop.left_out(step, step / 300, blocks=6, seed=drop.seed))

    assert sum(found.values()) == pytest.approx(1)
    for parity in (0, 1):
        own = np.array([kept(step) for step in range(parity, 300, 2)])
        mean = sum(share * kept(step) for step, share in found.items() if step % 2 == parity) / 0.5
        assert mean == pytest.approx(own.mean())
        assert max(kept(step) for step in found if step % 2 == parity) == own.max()
