"""Parts of a plan for models that give a row one number: reward models and rerankers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from workbench.adapters import Full
from workbench.config import RunConfig, model_heads
from workbench.data.batching import MicroBatch, micro_batches
from workbench.models import backbones
from workbench.models.backbones import Loader
from workbench.planning import step_time
from workbench.planning.dry_run import dry_run
from workbench.planning.dry_trainings import SingleTraining
from workbench.planning.fake_tensors import BlueprintLoader, fake_tensors
from workbench.recipes.plans import plan_parts
from workbench.recipes.plans.plan_parts import DryRunParts
from workbench.recipes.single.single_run import SingleRun
from workbench.runs.run_directory import Run
from workbench.training import capacity
from workbench.training.callbacks import Silent
from workbench.training.signal import Units


def rewards(config: RunConfig, run: Run) -> DryRunParts:
    """A reward model."""
    from workbench.recipes.preferences import reward

    rating = reward.begin(config, run, Silent())
    return _of_one_output(
        config,
        run,
        lambda own, run: replace(rating, config=own, run=run),
        rating.rows["held_out"].answers,
        lambda live, batch: live.rewards(batch),
    )


def rerankers(config: RunConfig, run: Run) -> DryRunParts:
    """A reranker."""
    from workbench.recipes.embeddings import rerank

    tokenizer, data, _ = rerank.prepare(config)
    return _of_one_output(
        config,
        run,
        lambda own, run: rerank.RerankRun(own, run, Silent(), tokenizer, data),
        data.held_out.all_pairs,
        lambda live, batch: live.scores(batch),
    )


def _of_one_output(
    config: RunConfig,
    run: Run,
    single: Callable[[RunConfig, Run], SingleRun[Any, Any]],
    scored: Units,
    outputs: Callable[[Any, MicroBatch], object],
) -> DryRunParts:
    """A model that gives each of the held-out `scored` one number."""
    loader, task, made = BlueprintLoader(), model_heads.of(config), single(config, run)
    numbers = np.arange(len(scored.lengths))
    longest = next(micro_batches(numbers, scored.lengths, tokens=capacity.FORWARD_TOKENS))
    worst = scored.batch(longest).to(backbones.device())

    def training(own: RunConfig, run: Run, load: Loader) -> SingleTraining:
        backbone = load(own.model, made.vocabulary, task=task, trainable=isinstance(own.adapter, Full))
        freezer, mine = plan_parts.attached(backbone, own, made.rows["train"]), single(own, run)
        return SingleTraining(mine.trainer(backbone, freezer, mine.assemble(freezer.model, backbone)))

    with fake_tensors():
        fit = training(config, run, loader)
        (backbone,) = loader.loaded
        live = made.assemble(fit.model, backbone)
        usage = dry_run(fit, lambda: outputs(live, worst))
        work = step_time.work(fit)
    return plan_parts.parts(config, task, backbone, fit, usage, work, training)
