"""A plan for several devices: the dry run of one, and arithmetic."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.workbench.planning.test_solver import COUNT, DryRuns
from workbench.cli import render
from workbench.config import RunConfig
from workbench.config.sections.distributed_config import DistributedConfig
from workbench.planning.plan import Candidate, Plan


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
    assert plan.host >= 12 * COUNT // 4 and plan.offload == "optimizer to cpu"
    assert planned(device="cpu", zero=2, offload_optimizer="cpu").needed == plan.peak + plan.host
    disk = planned(zero=3, offload_optimizer="nvme", nvme=tmp_path)
    assert disk.disk >= 12 * COUNT // 4 and disk.facts["disk_bytes"] == 4 * disk.disk


def test_a_program_reads_everything_and_a_person_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    ways = (Candidate("float32", 100, 50 * COUNT, False, 1.0), Candidate("float32, zero=3", 100, 7 * COUNT, True, 2.0))
    plan = replace(planned(zero=3, offload_optimizer="cpu", offload_parameters="cpu"), seconds=2.0, tried=ways)
    render.plan_json(plan)
    facts = json.loads(capsys.readouterr().out)
    assert {"weights", "gradients", "optimizer", "activations", "peak"} <= set(facts["bytes"])
    assert facts["bytes"]["optimizer"] == 0 < facts["timeline"]["step"]["host"]["optimizer"]
    assert facts["zero"] == {"stage": 3, "offload": "optimizer to cpu, parameters to cpu"}
    assert facts["hours"] == pytest.approx(20 / 3600)
    assert list(facts["timeline"]) == ["forward", "backward", "last gradients", "step"]
    assert "activations" not in facts["timeline"]["step"]["device"]
    render.plan(plan)
    told = capsys.readouterr().out
    for words in ("gathered weights", "in the host's memory", "zero=3", "does not fit", "20 s in all"):
        assert words in told
