"""`workbench plan`: memory and time of a run, found by a step on tensors without values and by timing blocks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from workbench.adapters import Full
from workbench.config import RunConfig, model_heads
from workbench.config.expansions import distill_expansion
from workbench.config.sections.distill_config import STUDENT, OnPolicyConfig
from workbench.config.sections.length_warm_up_config import LengthWarmUpConfig
from workbench.errors import ConfigError
from workbench.losses import chunked_loss
from workbench.losses.chunked_loss import planned_for
from workbench.models import backbones, output_heads
from workbench.models.backbones import Loader
from workbench.models.exported import ExportedModel
from workbench.planning import stage_training, step_time
from workbench.planning.counters import Operations
from workbench.planning.dry_run import dry_run
from workbench.planning.dry_trainings import SingleTraining, Training, UnitTraining
from workbench.planning.fake_tensors import BlueprintLoader, fake_tensors, packed_bytes
from workbench.planning.plan import WORKSPACES, Plan, scaling_advice
from workbench.planning.solver import SolverChoice, choose, formats
from workbench.planning.step_time import Timed
from workbench.recipes.single import streamed_rows, token_reference
from workbench.recipes.single.single_run import Supervise
from workbench.recipes.task import DryTask, implementation
from workbench.recipes.tasks.sft.task import dry_text
from workbench.recipes.tasks.sft.text_run import TextRun
from workbench.recipes.verbs.plans import (
    longest_rows,
    plan_bank,
    plan_blocks,
    plan_fleet,
    plan_parts,
    plan_settings,
    plan_stages,
)
from workbench.recipes.verbs.plans.longest_rows import LongestRow
from workbench.recipes.verbs.plans.plan_parts import DryRunParts
from workbench.runs import units
from workbench.runs.ranks import Ranks
from workbench.runs.run_directory import Run
from workbench.training import activation_checkpointing, activation_offload, capacity
from workbench.training.callbacks import Silent
from workbench.training.distributed import data_parallel, layout_checks, zero_offload
from workbench.training.optim import schedules


def solve(config: RunConfig, *, devices: int = 1, memory: int | None = None, elsewhere: bool = False) -> SolverChoice:
    """The fastest way to carry out a run that fits; every `auto` of its settings decided. Arguments as of `plan`."""
    config = streamed_rows.local(config)

    def timing(plan: Plan) -> Timed:
        flops = plan.dry_run.flops_per_token
        return step_time.assumed(plan.work, flops) if elsewhere else step_time.timed(plan.work, flops)

    if not elsewhere and backbones.device().type == "cpu" and config.over is None and config.task.tokens:
        config = _with_possible_weights(config, devices=devices, memory=memory)
    _require_known(config, devices)  # once: what the solver tries first has no shares, whose bytes it adds
    if config.distributed.zero != "auto":
        layout_checks.require(config, Ranks(0, devices))
    make = plan_fleet.remembering(partial(_planned, devices=devices, memory=memory, elsewhere=elsewhere))
    config = plan_fleet.decided(config, make)
    choice = choose(config, make, timing)
    if not choice.plan.fits or not plan_fleet.can_grow(config):
        return choice
    own = choice.config
    if choice.plan.device == "cpu":  # where micro-batches do not grow with the members
        own = own.model_copy(update={"batch": config.batch})
    members = plan_fleet.fitting(own, choice.plan, make, timing)
    return replace(choice, plan=replace(choice.plan, members=members))


def _with_possible_weights(config: RunConfig, *, devices: int, memory: int | None) -> RunConfig:
    """The same run without the formats of weights that are larger than the memory of all devices.

    Raises:
        ConfigError: those of every format are.
    """
    there = (memory or capacity.available(backbones.device())) * devices
    if config.distributed.nvme is not None:
        return config
    for weights in formats(config):
        fewer = config.model_copy(update={"model": config.model.model_copy(update={"weights": weights})})
        trainable = isinstance(fewer.adapter, Full)
        blueprint = backbones.blueprint(fewer.model, vocabulary=0, task=model_heads.of(config), trainable=trainable)
        size = packed_bytes(blueprint.model, blueprint.weights)
        if size <= there:
            return fewer
    raise ConfigError(
        f"The run does not fit into {units.size(there)}: its weights alone take {units.size(size)} "
        f"({blueprint.weights}), {size - there:,} bytes more.\n"
        "  Take a smaller model.id, or devices with that much more memory."
    )


def plan(config: RunConfig, *, devices: int = 1, memory: int | None = None, elsewhere: bool = False) -> Plan:
    """Memory and work of a run, without reading a weight: with the rows of one of so many devices.

    Args:
        memory: Bytes of the device; None: what is available here.
        elsewhere: The devices are accelerators of another machine.

    Raises:
        WorkbenchError: the run would be refused, or its recipe cannot be planned.
    """
    _require_known(config, devices)
    return _planned(config, devices=devices, memory=memory, elsewhere=elsewhere)


def _planned(config: RunConfig, *, devices: int, memory: int | None, elsewhere: bool) -> Plan:
    """`plan`, of what it knows."""
    config = streamed_rows.local(config)
    make = partial(_of_device, memory=memory, elsewhere=elsewhere)
    if config.distributed.pipeline > 1:
        return plan_stages.fullest(config, make, devices=devices)
    return make(config, devices=devices)


def _of_device(
    config: RunConfig,
    *,
    devices: int,
    memory: int | None,
    elsewhere: bool,
    way: Callable[[RunConfig, Run], DryRunParts] | None = None,
) -> Plan:
    """The plan of one device, or of the stage that `pipeline.planning` names.

    Args:
        way: In place of that of the recipe.
    """
    accelerated = elsewhere or backbones.device().type != "cpu"
    process = WORKSPACES * (not elsewhere) if accelerated else psutil.Process().memory_info().rss
    notes = list(plan_settings.clock(config))
    # Weights of rows change neither.
    config = plan_settings.untimed(config.model_copy(update={"data": config.data.unweighted}))
    own = plan_settings.of_one_device(config, devices, accelerated=accelerated)
    whole = output_heads.whole_last_block(_cuts(config))
    with ExitStack() as inside:
        copies = inside.enter_context(activation_offload.planned(accelerated))
        inside.enter_context(planned_for(memory if elsewhere else None))
        inside.enter_context(whole)
        folder = Path(inside.enter_context(tempfile.TemporaryDirectory()))
        parts = (way or _planned_task)(own, inside.enter_context(plan_blocks.planned_run(own, folder)))
    notes += [*plan_settings.notes(config), *implementation(config).plan_notes(config)]
    notes += [*_of_reference(config, parts), *_of_scaling(config, parts, devices)]
    fit, longest = parts.training, capacity.longest_part(own, parts.training.train.lengths)
    auto = config.batch.tokens_per_device == "auto"
    return Plan(
        device="accelerator" if elsewhere else str(backbones.device()),
        weights=parts.backbone.weights,
        checkpointing=config.train.checkpointing != "auto" and config.train.checkpointing,
        size=parts.size,
        steps=plan_settings.steps_worth(config, _total_steps(config, fit)),
        tokens_per_device=min(fit.tokens, longest * own.batch.size) if auto else fit.tokens,
        longest=longest,
        dry_run=parts.dry_run,
        work=replace(parts.work, once=parts.work.once / (1 if _cuts(config) else devices)),
        contents=parts.contents,
        process=process,
        offloaded=copies.most,
        memory=memory or capacity.available(backbones.device()) + process,  # which this process holds already
        notes=tuple(notes),
        recomputable=not activation_checkpointing.refusal(config, parts.backbone.model),
        by_block=activation_checkpointing.by_block(config, parts.backbone.model),
        devices=devices,
        distributed=own.distributed if config.distributed.zero == "auto" else config.distributed,
    )


def _total_steps(config: RunConfig, fit: Training) -> int:
    """Steps of a run; of a fleet those of the longest of the members that train at once."""
    longest = config.over is not None and not config.over.ships
    return fit.steps if longest else schedules.total_steps(config, fit.rows) or fit.steps


def _require_known(config: RunConfig, devices: int) -> None:
    """Refuse what `plan` knows nothing of; raises ConfigError."""
    over = config.over
    if over is not None and over.table is not None and config.task.compares:
        of = config.task.name
        raise ConfigError(f"of={of}: `plan` knows no bank of such members. Plan one: write recipe={of}.")
    if devices > 1 and over is not None and over.shared and not config.distributed.sharded:
        raise ConfigError(
            f"recipe={config.recipe} trains on one device, or over a backbone that devices share. Leave --devices out, "
            "or write distributed.engine=fsdp2 distributed.zero=3."
        )
    if over is None or not over.spread:
        return
    if devices > 1 and config.distributed.zero in ("auto", 0):
        raise ConfigError(
            f"recipe={config.recipe}: each device trains a share of the members by itself. Plan that share: leave "
            "--devices out, and write as many folds or values as one device gets. Or share weights: write "
            "distributed.engine=fsdp2 distributed.zero=3."
        )
    for key, (is_on, why) in data_parallel.refusals(config).items() if config.distributed.zero != "auto" else ():
        if is_on:
            raise plan_parts.one_after_another(config, f"{key}: {why}")


def _cuts(config: RunConfig) -> bool:
    """Whether devices read the same rows together, each with a share of the weights."""
    return config.distributed.zero != "auto" and zero_offload.cuts_weights(config.distributed)


def _of_reference(config: RunConfig, parts: DryRunParts) -> Iterator[str]:
    if token_reference.wanted(config):
        flops = parts.dry_run.flops_per_token * parts.work.tokens
        yield token_reference.cost(config, tokens=int(parts.training.train.lengths.sum()), flops=flops)


def _of_scaling(config: RunConfig, parts: DryRunParts, devices: int) -> Iterator[str]:
    """Advice of a law of pretraining, for a run that trains a whole language model on text."""
    if config.over is None and config.task.tokens and isinstance(config.adapter, Full):
        steps = schedules.total_steps(config, parts.training.rows) or parts.training.steps
        tokens = steps * parts.work.tokens * devices / config.distributed.tensor
        flops = parts.dry_run.flops_per_token * config.distributed.tensor * tokens
        yield scaling_advice(operations=flops, parameters=parts.size.total, tokens=tokens)


def longest_row(config: RunConfig, *, memory: int | None = None, elsewhere: bool = False) -> LongestRow:
    """The longest row that one device could train on; arguments as of `plan`.

    Raises:
        WorkbenchError: the run would be refused, or its recipe reads no rows of text as they are.
    """
    config = streamed_rows.local(config)
    _require_known(config, 1)
    accelerated = elsewhere or backbones.device().type != "cpu"
    with chunked_loss.few_parts():
        return longest_rows.find(config, partial(of_row, memory=memory, elsewhere=elsewhere), accelerated=accelerated)


def of_row(config: RunConfig, tokens: int, *, memory: int | None = None, elsewhere: bool = False) -> Plan:
    """The plan of one device for a run of tokens with one row of so many, all of which have loss."""

    def one_row(own: RunConfig, run: Run) -> DryRunParts:
        single = implementation(own).dry(own, run).single
        assert isinstance(single, TextRun)
        return _single(own, run, dry_text(longest_rows.with_row(single, tokens)))

    return _of_device(config, devices=1, memory=memory, elsewhere=elsewhere, way=one_row)


Teaching = Callable[[TextRun, Loader], Supervise[ExportedModel]]
"""From the student's run and what loads the teacher to what the student learns from."""


def _planned_task(config: RunConfig, run: Run) -> DryRunParts:
    """Whatever a run trains."""
    if config.over is None:
        return _single(config, run, implementation(config).dry(config, run))
    return plan_bank.members(config, run) if config.over.adapters else _student(config, run)


def _single(config: RunConfig, run: Run, dry: DryTask, teaching: Teaching | None = None) -> DryRunParts:
    """A run of one adapter.

    Args:
        teaching: What a student learns from.
    """
    whole = config.data.model_copy(update={"length_warm_up": LengthWarmUpConfig()})
    config = config.model_copy(update={"data": whole})  # the longest rows decide about memory
    loader, made = BlueprintLoader(), dry.single
    supervise = None if teaching is None else teaching(made, loader)  # type: ignore[arg-type]

    def training(own: RunConfig, run: Run, load: Loader, supervise: Supervise[Any] | None = None) -> SingleTraining:
        mine = replace(made, config=own, run=run)
        backbone = load(own.model, mine.vocabulary, task=mine.task, trainable=isinstance(own.adapter, Full))
        freezer = plan_parts.attached(backbone, own, mine.splits.train, mine.new_token_ids)
        trainer = mine.trainer(backbone, freezer, dry.assemble(mine, freezer.model, backbone), supervise)
        return UnitTraining(trainer) if dry.units else stage_training.of(trainer)

    with fake_tensors():
        fit = training(config, run, loader, supervise)
        backbone, *teachers = loader.loaded
        live = dry.assemble(made, fit.model, backbone)
        usage = dry_run(fit, lambda: dry.largest(live), others=[each.model for each in teachers])
        work = replace(step_time.work(fit), teacher=supervise is not None)
        if dry.looked or dry.once:
            with torch.no_grad(), Operations() as operations:
                tokens = dry.read(live)
            work = replace(work, forward=operations.count / tokens, looked=dry.looked * work.tokens, once=dry.once)
    return plan_parts.parts(config, made.task, backbone, fit, usage, work, training)


def _student(config: RunConfig, run: Run) -> DryRunParts:
    """A student with its teacher beside it."""
    from workbench.distillation import students
    from workbench.recipes.over import distill

    section = config.distill
    base = distill_expansion.student_config(config, run.path)
    source = distill.find_teacher(config) if base.task.tokens and section.peers is None else None
    if source is None:
        raise ConfigError(
            f"recipe={config.recipe}: `plan` knows students of tokens with a live teacher. Plan the student as a run "
            "of its own."
        )
    students.make(config, source, run.path / STUDENT, weights=False)
    run.note(distill={"teacher": source.name})  # whom the run would score first

    def teaching(student: TextRun, loader: Loader) -> Supervise[ExportedModel]:
        distill.require_teachable(config, base, source, student.tokenizer, student.template, student.data)
        # The rows as they are: what the student will write is not known.
        alone = config.model_copy(update={"distill": section.model_copy(update={"on_policy": OnPolicyConfig()})})
        return distill.supervise(alone, base, source, run, student.data, student.tokenizer, Silent(), loader)

    return _single(base, run, implementation(base).dry(base, run), teaching)
