"""`workbench plan`: what a run takes, found out by carrying out its step on tensors without numbers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn
from unittest.mock import patch

import psutil
from transformers import PreTrainedTokenizerBase

from workbench import evaluation
from workbench.config import RunConfig, distill_expansion, sweep_expansion, tasks
from workbench.config.budget_config import BudgetConfig
from workbench.config.distill_config import STUDENT, OnPolicyConfig
from workbench.config.distributed_config import DistributedConfig
from workbench.config.tasks import Task
from workbench.data.batching import Examples, first_rows
from workbench.data.text.chat import Template
from workbench.data.text.token_masking import Masking
from workbench.data.text.tokenized import Splits
from workbench.errors import ConfigError
from workbench.models import adapter_sizes, backbones, classifier, output_heads
from workbench.models.adapter_sizes import AdapterSize
from workbench.models.backbones import Backbone
from workbench.planning import step_time
from workbench.planning.dry_run import OPTIMIZER, DryRun, dry_run, largest_rows
from workbench.planning.dry_trainings import BankTraining, SingleTraining
from workbench.planning.fake_loading import fake_loading, settle
from workbench.planning.fake_quantised import packed_bytes
from workbench.planning.fake_tensors import fake_tensors
from workbench.planning.model_contents import contents
from workbench.planning.plan import Plan
from workbench.planning.solver import SolverChoice, choose, formats
from workbench.planning.step_time import StepWork, Timed
from workbench.planning.zero_memory import Contents
from workbench.recipes import plan_blocks, sft
from workbench.runs import files, run_directory, units
from workbench.runs.run_directory import Run
from workbench.training import bank_trainer, capacity, limits
from workbench.training.bank_trainer import BankTrainer
from workbench.training.callbacks import Silent
from workbench.training.distributed import layout_checks
from workbench.training.freezing import freezer as freezing
from workbench.training.freezing.freezer import Freezer
from workbench.training.trainer import Trainer

Teaching = Callable[[PreTrainedTokenizerBase, Template | Masking, Splits], sft.Supervise]


def solve(config: RunConfig, *, devices: int = 1, memory: int | None = None, elsewhere: bool = False) -> SolverChoice:
    """The fastest way to carry out a run that fits; every `auto` of its settings decided. Arguments as of `plan`."""

    def timing(found: Plan) -> Timed:
        flops = found.rehearsed.flops_per_token
        return step_time.assumed(found.work, flops) if elsewhere else step_time.timed(found.work, flops)

    if not elsewhere and backbones.device().type == "cpu" and config.recipe in ("sft", "mlm"):
        config = _with_possible_weights(config, devices=devices, memory=memory)
    return choose(config, partial(plan, devices=devices, memory=memory, elsewhere=elsewhere), timing)


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
        blueprint = plan_blocks.blueprint(fewer, tasks.of(config))
        size = packed_bytes(blueprint.model, blueprint.weights)
        if size <= there:
            return fewer
    raise ConfigError(
        f"The run does not fit into {units.size(there)}: its weights alone take {units.size(size)} "
        f"({blueprint.weights}), {size - there:,} bytes more.\n"
        "  Take a smaller model.id, or devices with that much more memory."
    )


class DryRunParts(NamedTuple):
    """Outcome of a dry run."""

    backbone: Backbone
    size: AdapterSize
    rows: int
    """That one model learns from."""
    longest: int
    """Tokens of the longest."""
    steps: int
    """Of this device alone."""
    tokens: int
    """In one forward pass."""
    rehearsed: DryRun
    work: StepWork
    contents: Contents


def plan(config: RunConfig, *, devices: int = 1, memory: int | None = None, elsewhere: bool = False) -> Plan:
    """Rehearse a run without reading a weight: the rows of one of so many devices.

    Args:
        memory: Bytes of the device; None: what is available here.
        elsewhere: The devices are accelerators of another machine.

    Raises:
        WorkbenchError: the run would be refused, or its recipe cannot be planned.
    """
    ways = {"sft": _text, "mlm": _text, "classify": _classes, "distill": _taught, "crossval": _bank, "sweep": _bank}
    if config.recipe not in ways:
        known = ", ".join(ways)
        raise ConfigError(f"recipe={config.recipe}: `plan` knows the recipes {known}. Plan one of its members as such.")
    if devices > 1 and config.recipe in layout_checks.SPREAD:
        raise ConfigError(
            f"recipe={config.recipe}: each device trains a share of the members by itself. Plan that share: leave "
            "--devices out, and write as many folds or values as one device gets."
        )
    if config.distributed.engine == "fsdp2":
        raise ConfigError(
            "distributed.engine=fsdp2: `plan` knows what DeepSpeed holds. Leave engine out: with the same zero a "
            "device holds about as much."
        )
    accelerated = elsewhere or backbones.device().type != "cpu"
    process = 0 if accelerated else psutil.Process().memory_info().rss
    config = _untimed(config)
    own = _of_one_device(config, devices, accelerated=accelerated)
    with tempfile.TemporaryDirectory() as folder:
        run = run_directory.start(Path(folder) / "plan", own, resume=False)
        try:
            parts = ways[config.recipe](own, run)
        finally:
            run.close()
    auto = config.batch.tokens_per_device == "auto"
    return Plan(
        device="accelerator" if elsewhere else str(backbones.device()),
        weights=parts.backbone.weights,
        checkpointing=config.train.checkpointing is True,
        size=parts.size,
        steps=limits.total_steps(config, parts.rows) or parts.steps,
        tokens_per_device=min(parts.tokens, parts.longest * own.batch.size) if auto else parts.tokens,
        longest=parts.longest,
        rehearsed=parts.rehearsed,
        work=parts.work,
        contents=parts.contents,
        process=process,
        memory=memory or capacity.available(backbones.device()) + process,  # which this process holds already
        notes=tuple(_notes(config)),
        recomputable=not config.adapter.no_checkpointing(parts.backbone.model),
        devices=devices,
        distributed=own.distributed if config.distributed.zero == "auto" else config.distributed,
    )


def _notes(config: RunConfig) -> Iterator[str]:
    if config.model.weights == "int8":
        yield "8-bit layers are taken to find outliers in every column, the most that there may be."
    if config.distributed.deepspeed is not None:
        yield f"What {config.distributed.deepspeed} asks for is not counted: each device is taken to hold everything."
    if config.recipe == "distill" and config.distill.on_policy.share:
        yield "Answers that the student writes itself (distill.on_policy) are not counted: they may be longer."
    if config.freeze.policy != "none" and config.freeze.cache in ("auto", "memory"):
        yield "Outputs of frozen blocks that freeze.cache keeps in memory are not counted: the run says how many."


def _text(config: RunConfig, run: Run, teaching: Teaching | None = None) -> DryRunParts:
    """A model of tokens.

    Args:
        teaching: From tokenizer, form and rows to what the model learns from.
    """
    tokenizer, template, data = sft.prepare(config, run)
    supervise = None if teaching is None else teaching(tokenizer, template, data)
    task = tasks.of(config)
    backbone = plan_blocks.blueprint(config, task, vocabulary=len(tokenizer))
    new_tokens = [tokenizer.get_vocab()[token] for token in config.model.new_tokens]
    worst = [data.held_out.subset(rows) for rows in largest_rows(data.held_out, tokens=capacity.FORWARD_TOKENS)]
    with _imagined(config, task, backbone, data.train, new_tokens) as freezer, fake_loading() as teachers:
        head = output_heads.known(backbone.model)
        fit = sft.fitting(config, run, data, backbone, freezer, head, Silent(), supervise)
        beside = [each.backbone.model for each in teachers]
        found = dry_run(
            SingleTraining(fit),
            lambda: [evaluation.likelihood(freezer.model, head, rows) for rows in worst],
            beside=beside,
        )
        padded = step_time.work(SingleTraining(fit))

    def fitting(own: RunConfig, run: Run, small: Backbone, freezer: Freezer) -> Trainer:
        return sft.fitting(own, run, data, small, freezer, output_heads.known(small.model), Silent())

    build = partial(
        plan_blocks.built,
        config,
        backbones.hub_config(config.model),
        task,
        data.train,
        fitting,
        new_tokens,
        len(tokenizer),
    )
    work = replace(padded, measure=plan_blocks.measure(config, backbone, fit, build), teacher=supervise is not None)
    return _parts(config, task, backbone, fit, found, work)


def _classes(config: RunConfig, run: Run) -> DryRunParts:
    from workbench.recipes import classify  # with scikit-learn, which takes a second to import

    tokenizer, data, _ = classify.prepare(config)
    task = classifier.task(data.labels, seed=config.seed)
    backbone = plan_blocks.blueprint(config, task)
    largest = largest_rows(data.held_out, tokens=capacity.FORWARD_TOKENS)
    worst = [data.held_out.batch(rows).to(backbones.device()) for rows in largest]
    with _imagined(config, task, backbone, data.train) as freezer:
        model = classifier.classification_model(freezer.model, backbone.model, tokenizer, data.labels)
        fit = classify.fitting(config, run, data, backbone, freezer, model, Silent())
        found = dry_run(SingleTraining(fit), lambda: [model.outputs(batch) for batch in worst])
        padded = step_time.work(SingleTraining(fit))
    build = plan_blocks.classes(config, tokenizer, data)
    work = replace(padded, measure=plan_blocks.measure(config, backbone, fit, build))
    return _parts(config, task, backbone, fit, found, work)


def _taught(config: RunConfig, run: Run) -> DryRunParts:
    """A student with its teacher beside it."""
    from workbench.distillation import students
    from workbench.recipes import distill

    section = config.distill
    base = distill_expansion.student_config(config, run.path)
    source = distill.find_teacher(config)
    if base.recipe == "classify" or section.peers is not None or source is None:
        raise ConfigError(
            "recipe=distill: `plan` knows students of tokens with a live teacher. Plan the student as a run of its own."
        )
    students.make(config, source, run.path / STUDENT, weights=False)
    run.note(distill={"teacher": source.name})  # whom the run would score first

    def teaching(tokenizer: PreTrainedTokenizerBase, template: Template | Masking, data: Splits) -> sft.Supervise:
        distill.require_teachable(config, base, source, tokenizer, template, data)
        # The rows as they are: what the student will write is not known.
        alone = config.model_copy(update={"distill": section.model_copy(update={"on_policy": OnPolicyConfig()})})
        return distill.supervise(alone, base, source, run, data, tokenizer, Silent())

    return _text(base, run, teaching)


def _bank(config: RunConfig, run: Run) -> DryRunParts:
    """Adapters that train together: what their recipe does up to there is done."""
    from workbench.recipes import crossval, sweep

    is_sweep = config.recipe == "sweep"
    apart = "folds.together=false asks for it" if not config.folds.together else bank_trainer.refusal(config)
    if reason := sweep.apart(config) if is_sweep else apart:
        raise ConfigError(f"recipe={config.recipe}: its members train one after another ({reason}). Plan one of them.")
    found: list[tuple[BankTrainer, DryRun, StepWork]] = []

    def rehearsed(fit: BankTrainer) -> NoReturn:
        first = next(iter(fit.members.values())).task
        evaluates = first.config.evaluate.every is not None
        together = BankTraining(fit)
        rehearsal = dry_run(together, first.held_out_loss if evaluates else lambda: None)
        found.append((fit, rehearsal, step_time.work(together)))
        raise _Enough

    files.write_json(run.path / "before.json", {})  # the run would score the backbone first
    with fake_tensors(), fake_loading() as asked, patch.object(BankTrainer, "work", rehearsed), suppress(_Enough):
        (sweep if is_sweep else crossval).main(config, run, Silent())
    ((fit, rehearsal, padded),) = found
    # Rows of all members are computed together, and take about as long as those of one.
    build = plan_blocks.member(sweep_expansion.shared(config) if is_sweep else config, asked[0].task, run)
    work = replace(padded, measure=plan_blocks.measure(config, asked[0].backbone, fit, build))
    size = adapter_sizes.predict(config.model, config.adapter, task=asked[0].task)
    train_tasks = [each.task for each in fit.members.values()]
    return DryRunParts(
        backbone=asked[0].backbone,
        size=size._replace(trainable=sum(each.numel() for each in fit.masters)),
        rows=max(len(each.train) for each in train_tasks),
        longest=max(int(each.train.lengths.max()) for each in train_tasks),
        steps=max(each.total for each in fit.members.values()),
        tokens=fit.tokens,
        rehearsed=rehearsal,
        work=work,
        contents=contents(fit, optimizer=rehearsal.at_peak.get(OPTIMIZER, 0)),
    )


class _Enough(BaseException):
    """Ends a dry run early, when all facts are known."""


def _parts(
    config: RunConfig, task: Task, backbone: Backbone, fit: Trainer, rehearsed: DryRun, work: StepWork
) -> DryRunParts:
    return DryRunParts(
        backbone=backbone,
        size=adapter_sizes.predict(
            config.model, config.adapter, task=task, below=config.freeze.never(len(fit.freezer.blocks))
        ),
        rows=len(fit.train),
        longest=int(fit.train.lengths.max()),
        steps=fit.member.total,
        tokens=fit.tokens,
        rehearsed=rehearsed,
        work=work,
        contents=contents(fit, optimizer=rehearsed.at_peak.get(OPTIMIZER, 0)),
    )


@contextmanager
def _imagined(
    config: RunConfig, task: Task, backbone: Backbone, train: Examples, new_token_ids: Sequence[int] = ()
) -> Iterator[Freezer]:
    """Inside the block the backbone is imagined, with the adapter of the run."""
    # Layers of bitsandbytes that hold nothing yet cannot be called.
    plain = config.model.model_copy(update={"weights": "float32", "compute": "float32"})
    layers = freezing.layers_of(backbones.skeleton(plain, task=task), config)
    sample = partial(first_rows, train, seed=config.seed)
    with fake_tensors():
        settle(backbone.model, backbone)
        model = freezing.adapt(
            backbone.model, config, layers, seed=config.seed, new_token_ids=new_token_ids, sample=sample
        )
        yield Freezer(model, backbone.model, layers, config.freeze, seed=config.seed)


def _of_one_device(config: RunConfig, devices: int, *, accelerated: bool) -> RunConfig:
    """A run of a device's own rows, which an accelerator would compute at once, by one that holds everything."""
    rows = -(-config.batch.size // devices)
    batch = config.batch.model_copy(update={"size": rows})
    if accelerated and batch.tokens_per_device == "auto":
        batch = batch.model_copy(update={"tokens_per_device": rows * config.data.max_tokens})
    return config.model_copy(update={"batch": batch, "distributed": DistributedConfig()})


def _untimed(config: RunConfig) -> RunConfig:
    """The same run without a wall clock, of one epoch where nothing else ends it."""
    if not config.budget.timed:
        return config
    ends = config.train.steps is not None or config.train.epochs is not None or config.budget.tokens is not None
    train = config.train if ends else config.train.model_copy(update={"epochs": 1.0})
    return config.model_copy(update={"budget": BudgetConfig(tokens=config.budget.tokens), "train": train})
