"""Inputs of blocks wait on the host where nothing else fits, and on an accelerator alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.workbench.planning.test_solver import FIXED, LENGTH, ROWS, DryRuns, timing
from workbench.config import RunConfig
from workbench.planning import solver
from workbench.planning.counters import ACTIVATIONS
from workbench.planning.plan import Plan
from workbench.planning.solver import SolverChoice


class Offloading(DryRuns):
    """Where inputs of blocks wait on the host, 100 bytes a token stay and 200 wait."""

    def __call__(self, config: RunConfig) -> Plan:
        plan = super().__call__(config)
        if config.train.offload_activations is not True:
            return plan
        peak = {**plan.dry_run.at_peak, ACTIVATIONS: 100 * plan.tokens_per_device}
        return replace(plan, dry_run=replace(plan.dry_run, at_peak=peak), offloaded=200 * plan.tokens_per_device)


def choose(memory: int, *, device: str = "accelerator", **train: Any) -> tuple[SolverChoice, Offloading]:
    dry_runs = Offloading(memory, device=device)
    values = {"recipe": "sft", "data": {"train": "rows.jsonl"}, "batch": {"size": ROWS}, "train": train}
    return solver.choose(RunConfig.model_validate(values), dry_runs, timing), dry_runs


def test_where_recomputing_fits_nothing_waits() -> None:
    found, _ = choose(FIXED + 300 * LENGTH)
    assert found.config.train.checkpointing is True and found.config.train.offload_activations == "auto"
    assert found.plan.host == 0


def test_else_inputs_of_blocks_wait_with_as_many_tokens_as_fit() -> None:
    found, _ = choose(FIXED + 25_000)
    assert found.plan.fits and found.config.train.offload_activations is True
    assert found.config.model.weights == "auto", "before weights are quantised"
    tokens = found.plan.tokens_per_device
    assert LENGTH <= tokens <= 250 and found.plan.host == 200 * tokens
    assert any(way.way == "auto, checkpointing, inputs of blocks to cpu" for way in found.plan.tried)


@pytest.mark.parametrize("train", [{"offload_activations": False}, {"checkpointing": False}])
def test_not_where_the_configuration_says_otherwise(train: dict[str, bool]) -> None:
    found, _ = choose(FIXED + 25_000, **train)
    assert found.plan.offloaded == 0


def test_a_cpu_has_no_other_memory() -> None:
    found, _ = choose(FIXED + 25_000, device="cpu")
    assert found.plan.offloaded == 0 and found.config.model.weights == "nf4"


@pytest.mark.parametrize(("engine", "planned"), [("deepspeed", None), ("fsdp2", "auto")])
def test_where_a_layer_is_fetched_by_itself_mlps_are_planned_without_tiles(engine: str, planned: str | None) -> None:
    values = {"recipe": "sft", "data": {"train": "rows.jsonl"}, "batch": {"size": ROWS}}
    train, distributed = {"checkpointing": True}, {"zero": 3, "engine": engine}
    config = RunConfig.model_validate({**values, "train": train, "distributed": distributed})
    dry_runs, tiles = DryRuns(10**9, devices=2), set[object]()

    def dry_run(config: RunConfig) -> Plan:
        tiles.add(config.train.mlp_tile)
        return dry_runs(config)

    solver.choose(config, dry_run, timing)
    assert tiles == {planned}
