"""Small models stand for the whole one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from workbench.config import ModelConfig
from workbench.models import backbones
from workbench.planning import block_time, step_time
from workbench.planning.block_time import Measured, Small, smaller
from workbench.planning.roofline import matmul_rate
from workbench.planning.step_time import StepWork
from workbench.recipes.load import load
from workbench.recipes.plan import plan

SHORT = ["data.limit=60", "data.max_tokens=64", "batch.size=8", "model.weights=float32"]


@pytest.mark.parametrize("adapter", ["{method: lora}", "{method: full}"])
def test_operations_of_small_models_add_up_to_those_of_the_whole(adapter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_time, "PASSES", (1, 1))
    config = load("sft/quickstart", [*SHORT, f"adapter={adapter}"])
    whole = _measured(plan(config).work)
    monkeypatch.setattr("workbench.recipes.plan_blocks.WHOLE", 0)
    assert _measured(plan(config).work).flops == pytest.approx(whole.flops, rel=1e-6)
    monkeypatch.setattr(block_time, "WIDTH", 128)
    assert _measured(plan(config).work).flops == pytest.approx(whole.flops, rel=0.2), (
        "narrower, too, but for LoRA's thin products"
    )


def _measured(work: StepWork) -> Measured:
    assert work.measure is not None
    ticks = iter(range(10**9))
    return work.measure(lambda: float(next(ticks)), 1.0)


def test_a_smaller_backbone_is_of_the_same_kind(tmp_path: Path) -> None:
    whole = backbones.hub_config(ModelConfig())
    small = backbones.hub_config(smaller(ModelConfig(), whole, Small(2, 2), tmp_path))
    assert type(small) is type(whole) and small.vocab_size == whole.vocab_size
    assert (small.num_hidden_layers, small.hidden_size) == (2, whole.hidden_size // 2)
    assert small.head_dim == whole.head_dim


def test_no_step_is_faster_than_its_products() -> None:
    measured = Measured(block=1e-9, rest=0.0, update=0.0, flops=1e6, rate=1e9, spread=0.0)
    found = step_time.timed(StepWork(padded=100, tokens=80, measure=lambda *_: measured), 1e6)
    assert found.low <= found.seconds <= found.high
    assert found.seconds >= 100 * 1e6 / 1e9


def test_the_roofline_is_a_rate_that_this_machine_has() -> None:
    assert 1e8 < matmul_rate(torch.device("cpu"), torch.float32) < 1e15
