"""A plan for several devices: the dry run of one, and arithmetic.

The members that fit are the most of which a dry run says so.
The law by the figures of its paper.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.workbench.planning.test_solver import COUNT, DryRuns
from workbench.cli import render
from workbench.config import RunConfig
from workbench.config.sections.distributed_config import DistributedConfig
from workbench.planning import plan
from workbench.planning.plan import MOST, Candidate, Plan, that_fit
from workbench.training import checkpoint_parts


def planned(devices: int = 4, device: str = "accelerator", **settings: Any) -> Plan:
    config = RunConfig.model_validate({"recipe": "sft", "data": {"train": "rows.jsonl"}})
    plan = DryRuns(100 * COUNT, devices=devices, device=device)(config)
    return replace(plan, distributed=DistributedConfig.model_validate({"bucket_bytes": 4000, **settings}))


def test_one_device_takes_what_its_dry_run_takes() -> None:
    plan = planned(1)
    assert plan.at_peak == plan.dry_run.at_peak
    assert (plan.peak, plan.evaluation) == (plan.dry_run.peak, plan.dry_run.evaluation)
    assert plan.host == plan.disk == 0


def test_shares_take_less_of_a_device() -> None:
    whole = planned()
    for stage in (2, 3):
        shared = planned(zero=stage)
        assert shared.peak < whole.peak
        assert shared.at_peak["optimizer"] == whole.at_peak["optimizer"] // 4


def test_what_waits_outside_is_the_hosts_and_of_a_cpu_its_own(tmp_path: Any) -> None:
    plan = planned(zero=2, offload_optimizer="cpu")
    assert plan.needed == plan.peak < planned(zero=2).peak
    assert plan.host >= 12 * COUNT // 4
    assert planned(device="cpu", zero=2, offload_optimizer="cpu").needed == plan.peak + plan.host
    disk = planned(zero=3, offload_optimizer="nvme", nvme=tmp_path)
    assert disk.disk >= 12 * COUNT // 4 and disk.facts["disk_bytes"] == 4 * disk.disk


def test_a_plan_fits_where_the_device_and_the_host_have_room(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host holds what waits there, of all devices, and a checkpoint: weights in float32 and two states of Adam."""
    plan = planned(zero=2, offload_optimizer="cpu")
    assert replace(plan, saves_aside=True).host_needed == 4 * plan.host + 12 * COUNT
    assert plan.host_needed == 4 * plan.host + 2 * 12 * COUNT, "a file and its bytes as they are written"
    monkeypatch.setattr(checkpoint_parts, "VOLUME", COUNT // 10)
    assert plan.host_needed == 4 * plan.host + plan.contents.element * COUNT, "what the first process has at the end"
    assert plan.fits and replace(plan, host_memory=plan.host_needed).fits
    tight = replace(plan, host_memory=plan.host_needed - 1)
    assert not tight.fits and tight.host_missing == tight.missing == 1
    assert replace(tight, memory=plan.needed - 2).missing == 3
    render.plan(tight)
    assert "of the host's memory" in " ".join(capsys.readouterr().out.split())
    assert planned(device="cpu", zero=2, offload_optimizer="cpu").host_needed == 0, "its memory is the host's"


def test_a_program_reads_everything_and_a_person_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    ways = (
        Candidate("float32", 100, 50 * COUNT, False, 0.0, "lacks 9 GB a device"),
        Candidate("float32, zero=3", 100, 7 * COUNT, True, 2.0),
    )
    plan = replace(planned(zero=3, offload_optimizer="cpu", offload_parameters="cpu"), seconds=2.0, tried=ways)
    render.plan_json(plan)
    facts = json.loads(capsys.readouterr().out)
    assert {"weights", "gradients", "optimizer", "activations", "peak"} <= set(facts["bytes"])
    assert facts["bytes"]["optimizer"] == 0 < facts["timeline"]["step"]["host"]["optimizer"]
    assert facts["zero"] == {"stage": 3, "layout": "zero=3, optimizer to cpu, parameters to cpu"}
    assert facts["hours"] == pytest.approx(20 / 3600)
    assert list(facts["timeline"]) == ["forward", "backward", "last gradients", "step"]
    assert "activations" not in facts["timeline"]["step"]["device"]
    render.plan(plan)
    told = " ".join(capsys.readouterr().out.split())
    assert "0 ms" not in told, "nobody knows how long a step takes that does not fit"
    for words in ("gathered weights", "in the host's memory", "zero=3", "lacks 9 GB a device", "20 s in all"):
        assert words in told


BYTES: dict[str, Callable[[int], int]] = {
    "even": lambda many: 1000 + 70 * many,
    "uneven": lambda many: 1000 + 70 * many + 900 * (many > 6),
    "steeper": lambda many: 1000 + 70 * many + many**2,
    "flatter": lambda many: 1000 + round(300 * math.sqrt(many)),
}


@pytest.mark.parametrize("memory", [900, 1100, 1300, 1500, 2300, 2700])
@pytest.mark.parametrize("needed", BYTES.values(), ids=BYTES)
def test_no_more_fit_and_no_fewer(needed: Callable[[int], int], memory: int) -> None:
    found = that_fit(needed, few=2, memory=memory)
    wanted = max((many for many in range(1, 200) if needed(many) <= memory), default=0)
    if wanted <= MOST:
        assert found.count == wanted
        assert found.count == 0 or found.known[found.count] == needed(found.count)
    else:
        assert found.count > MOST


def test_beyond_what_is_tried_bytes_grow_by_the_member() -> None:
    found = that_fit(BYTES["even"], few=2, memory=1_001_000)
    assert found.count == 1_000_000 // 70 and found.each == 70
    assert max(found.known) == MOST, "no dry run of thousands"
    assert "14,285 adapters like these" in found.sentence


@pytest.mark.parametrize(
    ("parameters", "tokens", "operations"),
    # Hoffmann et al. 2022, table 3: compute-optimal sizes by the first approach.
    [(400e6, 8.0e9, 1.92e19), (1e9, 20.2e9, 1.21e20), (10e9, 205.1e9, 1.23e22), (67e9, 1.5e12, 5.76e23)],
)
def test_it_is_the_table_of_the_paper(parameters: float, tokens: float, operations: float) -> None:
    found = plan.compute_optimal(operations)
    assert found == (pytest.approx(parameters, rel=0.12), pytest.approx(tokens, rel=0.12))
    assert 6 * found[0] * found[1] == pytest.approx(operations)


def test_the_sentence_says_what_it_is_about() -> None:
    text = plan.scaling_advice(operations=1.2e14, parameters=6_000_000, tokens=1_000_000)
    assert text.startswith("Scaling law of pretraining, which fine-tuning does not follow")
    assert "1.0 M parameters" in text and "20.0 M tokens; this run has 6.0 M, and 1.0 M tokens" in text
