"""Plans of pipelines: the fullest stage, the time of the slowest, and what it holds of a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import write_questions
from tests.workbench.planning.test_solver import COUNT, DryRuns
from workbench.config import RunConfig
from workbench.models import backbones
from workbench.planning import step_time
from workbench.planning.plan import Plan
from workbench.planning.sharded_memory import Contents
from workbench.planning.step_time import Measured, Roofline, StepWork
from workbench.recipes.load import load
from workbench.recipes.verbs.plans import plan_stages
from workbench.recipes.verbs.plans.plan import plan
from workbench.training.distributed import pipeline

STAGES, PASSES, TOKENS, UPDATE = 4, 6, 3000.0, 0.5
ACTIVATIONS, FLOPS, TRAINED = (40, 50, 20, 30), (0.2, 0.25, 0.25, 0.3), (0.4, 0.2, 0.2, 0.3)
"""Of each stage; of operations and values that train, shares of the whole model's."""


def made(config: RunConfig, *, devices: int) -> Plan:
    """A plan of the whole model or of a stage."""
    known = DryRuns(10**9, devices=devices)(config)
    work = StepWork(TOKENS, TOKENS, PASSES, measure=lambda *_: Measured(1e-3, 0.0, UPDATE, 10.0, Roofline(1e9, 1e9)))
    known = replace(known, work=work, notes=(f"of {devices}",), distributed=config.distributed)
    if config.distributed.pipeline == 1:
        return known
    stage = pipeline.PLANNED.get()
    dry_run = replace(
        known.dry_run,
        at_peak={**known.dry_run.at_peak, "activations": ACTIVATIONS[stage] * COUNT},
        micro_batches=1,
        flops_per_token=FLOPS[stage],
    )
    return replace(known, dry_run=dry_run, contents=Contents(trained=(int(TRAINED[stage] * COUNT),), element=4))


def test_the_fullest_stage_is_planned_and_the_slowest_timed() -> None:
    config = RunConfig.model_validate(
        {
            "recipe": "sft",
            "data": {"train": "rows.jsonl"},
            "distributed": {"pipeline": STAGES},
            "evaluate": {"answers": 0},
        }
    )
    planned = plan_stages.fullest(config, made, devices=8)
    assert planned.at_peak["activations"] == 50 * COUNT and planned.devices == 8
    assert planned.distributed == config.distributed and planned.dry_run.micro_batches == 4
    assert planned.notes == ("of 2", plan_stages.NOTE)
    taken = step_time.timed(planned.work, planned.dry_run.flops_per_token).seconds
    bubble = (PASSES + STAGES - 1) / PASSES
    assert taken == pytest.approx(TOKENS * 1e-3 * 0.3 * bubble + UPDATE * 0.4)
    elsewhere = step_time.assumed(planned.work, planned.dry_run.flops_per_token).seconds
    assert elsewhere == pytest.approx(TOKENS * 0.3 * bubble / step_time.ACCELERATOR_FLOPS)


def test_a_stage_holds_its_blocks_and_an_end(tmp_path: Path, short_stories: str) -> None:
    """And its step on tensors without values keeps no other weight, gradient or state."""
    write_questions(tmp_path / "rows.jsonl", ["four"] * 12)
    (tmp_path / "recipe.yaml").write_text(
        f"recipe: sft\nmodel: {{id: {short_stories}, weights: float32}}\n"
        f"data: {{train: {tmp_path / 'rows.jsonl'}}}\nadapter: {{method: full}}\n"
        "batch: {size: 8, tokens_per_device: 100}\nevaluate: {answers: 0}\ndistributed: {pipeline: 2}\n"
    )
    config = load(tmp_path / "recipe.yaml", [])
    planned = plan(config, devices=2)
    model = backbones.load(config.model, None).model
    tied = model.config.tie_word_embeddings
    ends = (("embed_tokens.", "layers.0."), ("layers.1.", "model.norm.", "embed_tokens." if tied else "lm_head."))
    held = [
        sum(each.numel() for name, each in model.named_parameters() if any(part in name for part in parts))
        for parts in ends
    ]
    assert planned.contents.trainable in held and max(held) < sum(each.numel() for each in model.parameters())
    few = 4000  # bytes: buffers, and the counts of the optimizer's steps
    for name, size in {"weights": 4, "gradients": 4, "optimizer": 8}.items():
        assert 0 <= planned.at_peak[name] - size * planned.contents.trainable < few
    assert planned.dry_run.micro_batches > 1 and plan_stages.NOTE in planned.notes
