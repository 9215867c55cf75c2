"""`workbench plan`: memory and time of a run, found by a step on tensors without values and by timing blocks."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch

from workbench.adapters import Full
from workbench.config import RunConfig, model_heads
from workbench.config.expansions import distill_expansion, fleet_expansion
from workbench.config.sections.budget_config import BudgetConfig
from workbench.config.sections.curriculum_config import LengthWarmUpConfig
from workbench.config.sections.distill_config import STUDENT, OnPolicyConfig
from workbench.data.batching import micro_batches
from workbench.errors import ConfigError
from workbench.losses import chunked_loss
from workbench.losses.chunked_loss import planned_for
from workbench.models import attention_backend, backbones, output_heads, picture_features, weight_formats
from workbench.models.backbones import Loader
from workbench.planning import cards, stage_training, step_time
from workbench.planning.cards import DeviceCard
from workbench.planning.counters import MemoryLedger, Operations
from workbench.planning.dry_run import TEACHER, dry_run
from workbench.planning.dry_trainings import SingleTraining, Training, UnitTraining
from workbench.planning.fake_tensors import BlueprintLoader, fake_tensors, packed_bytes
from workbench.planning.plan import WORKSPACES, Plan, scaling_advice
from workbench.planning.solver import SolverChoice, choose, formats
from workbench.planning.step_time import Timed
from workbench.recipes.load import Recipe, load
from workbench.recipes.single import streamed_rows, token_reference
from workbench.recipes.single.single_run import SingleRun, Supervise
from workbench.recipes.task import DryTask, implementation
from workbench.recipes.tasks.sft.task import dry_text
from workbench.recipes.tasks.sft.text_run import TextRun
from workbench.recipes.verbs.plans import longest_rows, plan_fleet, plan_parts, plan_stages
from workbench.recipes.verbs.plans.longest_rows import LongestRow
from workbench.recipes.verbs.plans.plan_parts import Carried, DryRunParts
from workbench.runs import process_memory, units
from workbench.runs.ranks import Ranks
from workbench.runs.run_directory import Run
from workbench.training import activation_checkpointing, activation_offload, capacity
from workbench.training.distributed import data_parallel, layout_checks, zero_offload
from workbench.training.optim import schedules
from workbench.training.search.halving import Halving

if TYPE_CHECKING:
    from workbench.distillation.teacher_sources import TeacherSource


@dataclass(frozen=True)
class PlanTarget:
    """What a plan is for."""

    devices: int = 1
    memory: int | None = None
    """Bytes of each device; None: what is free here."""
    elsewhere: bool = False
    """Whether the devices are accelerators that need not be here."""
    card: DeviceCard | None = None
    """Their name and rates, where they are known."""
    host: int | None = None
    """Bytes of the host's memory; None: what is free here, or not known of another machine."""

    def packs(self, config: RunConfig) -> bool:
        """Whether an accelerator that need not be here packs rows where that pays: in half precision."""
        single = config.model.compute == "float32" or (config.model.weights, config.model.compute) == (
            "float32",
            "auto",
        )
        return not single and (self.card is None or self.card.packs)

    @property
    def bfloat16(self) -> bool:
        """Whether an accelerator that need not be here has units for products in bfloat16."""
        return self.card is None or self.card.bfloat16

    @classmethod
    def of(
        cls,
        devices: int | None = None,
        memory: int | str | None = None,
        device: str | None = None,
        host_memory: int | str | None = None,
    ) -> PlanTarget:
        """Of what `solve` is asked for; raises ConfigError where that makes no sense."""
        size = None if memory is None else units.byte_size(memory, name="memory")
        host = None if host_memory is None else units.byte_size(host_memory, name="host_memory")
        here = backbones.device().type
        if device == "cpu":
            if here != "cpu":
                raise ConfigError(f"device=cpu: this machine trains on {here}. Write CUDA_VISIBLE_DEVICES= before it.")
            return cls(devices or 1, size, host=host)
        card = None if device is None else cards.find(device)
        if card is not None:
            return cls(devices or 1, size or card.memory, elsewhere=True, card=card, host=host)
        elsewhere = size is not None and (devices is not None or here == "cpu")
        if host is None and not elsewhere and here != "cpu":
            host = int(psutil.virtual_memory().available)
        return cls(devices or 1, size, elsewhere=elsewhere, host=host)

    def notes(self) -> Iterator[str]:
        """A sentence on rates that are assumed."""
        if self.elsewhere and self.card is None:
            yield (
                f"Time is assumed: of an accelerator of {step_time.ACCELERATOR_FLOPS / 1e12:.0f} TFLOP/s, or a quarter "
                "of that. Write --device NAME for a card's own."
            )
        elif self.card is not None:
            low, _, high = step_time.REACHED
            yield (
                f"Time is assumed: the {self.card.name} computes {self.card.half / 1e12:,.0f} TFLOP/s in halves "
                f"({self.card.single / 1e12:,.0f} in float32), of which a step reaches {high:.0%} to {low:.0%}."
            )


def solve(
    recipe: Recipe,
    overrides: Sequence[str] = (),
    *,
    devices: int | None = None,
    memory: int | str | None = None,
    device: str | None = None,
    host_memory: int | str | None = None,
) -> SolverChoice:
    """The fastest way to carry out a run that fits, with its memory and time, found without reading a weight.

    Args:
        recipe: A configuration, a YAML file, or the name of a shipped recipe.
        overrides: `key=value` words on top of a file or name.
        devices: How many share the run; None: one. With `memory`, they are accelerators that may be elsewhere.
        memory: Of each device, in bytes or as `24GB`; None: what is free here, or the card's. On a machine without an
            accelerator it is that of a card.
        device: A card by name, such as `4090`, that need not be here; `cpu`: this machine's.
        host_memory: Of the machine that has all devices, in bytes or as `128GB`; None: what is free here.

    Returns:
        The `plan`, and the `config` in which every `auto` is decided. Where nothing fits, `cure` says what would, and
        `require()` raises it.

    Raises:
        WorkbenchError: The run would be refused, or its recipe cannot be planned.

    Examples:
        >>> import workbench
        >>> choice = workbench.plan("sft/quickstart", ["data.limit=40"], devices=1, memory="24GB")
        >>> choice.plan.fits, choice.plan.needed < 1e9
        (True, True)
    """
    return choice(load(recipe, overrides), PlanTarget.of(devices, memory, device, host_memory))


def choice(config: RunConfig, target: PlanTarget) -> SolverChoice:
    """As `solve`, for devices that are known."""
    config = streamed_rows.local(config)

    def timing(plan: Plan) -> Timed:
        flops = plan.dry_run.flops_per_token
        if target.elsewhere:
            single = "float32" in (config.model.weights, config.model.compute) or not target.bfloat16
            return step_time.assumed(plan.work, flops, target.card, single=single)
        timed = step_time.timed(plan.work, flops)
        # Kernels, and what libraries keep of a step, are there by now.
        return replace(timed, process=process_memory.settled() + plan.end) if plan.device == "cpu" else timed

    if not target.elsewhere and backbones.device().type == "cpu" and config.over is None and config.task.tokens:
        config = _with_possible_weights(config, devices=target.devices, memory=target.memory)
    _require_known(config, target.devices)  # once: what the solver tries first has no shares, whose bytes it adds
    layout_checks.require(config, Ranks(0, target.devices))
    make = plan_fleet.remembering(partial(_planned, target=target))
    config = plan_fleet.decided(config, make)
    found = choose(config, make, timing)
    if not found.plan.fits or not plan_fleet.can_grow(config):
        return found
    own = found.config
    if found.plan.device == "cpu":  # where micro-batches do not grow with the members
        own = own.model_copy(update={"batch": config.batch})
    members = plan_fleet.fitting(own, found.plan, make, timing)
    return replace(found, plan=replace(found.plan, members=members))


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
    return _planned(config, target=PlanTarget(devices, memory, elsewhere))


def _planned(config: RunConfig, *, target: PlanTarget) -> Plan:
    config = backbones.with_arriving_weights(streamed_rows.local(config))
    make = partial(_of_device, target=target)
    if config.distributed.pipeline > 1:
        return plan_stages.fullest(config, make, devices=target.devices)
    return make(config, devices=target.devices)


def _of_device(
    config: RunConfig,
    *,
    devices: int,
    target: PlanTarget,
    way: Callable[[RunConfig, Run], DryRunParts] | None = None,
) -> Plan:
    """The plan of one device, or of the stage that `pipeline.PLANNED` names.

    Args:
        way: In place of that of the recipe.
    """
    memory, elsewhere = target.memory, target.elsewhere
    accelerated = elsewhere or backbones.device().type != "cpu"
    process = WORKSPACES * (not elsewhere) if accelerated else plan_parts.libraries()
    sentences = [*target.notes(), *clock(config)]
    # Weights of rows change neither.
    config = untimed(config.model_copy(update={"data": config.data.unweighted}))
    packs = target.packs(config) if elsewhere else True
    own = of_one_device(config, devices, accelerated=accelerated, packs=packs)
    whole = output_heads.whole_last_block(_cuts(config))
    with ExitStack() as inside:
        inside.enter_context(activation_offload.planned(accelerated))
        inside.enter_context(attention_backend.planned(elsewhere and packs))
        inside.enter_context(planned_for(memory if elsewhere else None, bfloat16=target.bfloat16))
        inside.enter_context(whole)
        folder = Path(inside.enter_context(tempfile.TemporaryDirectory()))
        parts = (way or _planned_task)(own, inside.enter_context(plan_parts.planned_run(own, folder)))
    sentences += [*notes(config), *implementation(config).plan_notes(config)]
    fit = parts.training
    if config.distributed.tensor > 1 and parts.contents.added_up is None:
        sentences.append("The time in which devices add up outputs of blocks (distributed.tensor) is not counted.")
    end = 0 if accelerated else implementation(config).end_bytes(config, fit.train)
    if token_reference.wanted(config):
        flops = parts.dry_run.flops_per_token * parts.work.tokens
        sentences.append(token_reference.cost(config, tokens=int(fit.train.lengths.sum()), flops=flops))
    if config.over is None and config.task.tokens and isinstance(config.adapter, Full):
        # Advice of a law of pretraining, for a run that trains a whole language model on text.
        steps = schedules.total_steps(config, fit.rows) or fit.steps
        tokens = steps * parts.work.tokens * devices / config.distributed.tensor
        operations = parts.dry_run.flops_per_token * config.distributed.tensor * tokens
        sentences.append(scaling_advice(operations=operations, parameters=parts.size.total, tokens=tokens))
    longest = capacity.longest_part(own, parts.training.train.lengths)
    auto = config.batch.tokens_per_device == "auto"
    return Plan(
        device="accelerator" if elsewhere else str(backbones.device()),
        weights=parts.backbone.weights,
        checkpointing=config.train.checkpointing != "auto" and config.train.checkpointing,
        size=parts.size,
        steps=steps_worth(config, _total_steps(config, fit)),
        tokens_per_device=min(fit.tokens, longest * own.batch.size) if auto else fit.tokens,
        longest=longest,
        dry_run=parts.dry_run,
        work=replace(parts.work, once=parts.work.once / (1 if _cuts(config) else devices)),
        contents=parts.contents,
        process=process + end,
        end=end,
        card=target.card,
        host_memory=target.host,
        saves_aside=config.save.asynchronous,
        offloaded=parts.dry_run.offloaded,
        memory=memory or capacity.available(backbones.device()) + process,  # which this process holds already
        notes=tuple(sentences),
        recomputable=not activation_checkpointing.refusal(config, parts.backbone.model),
        by_block=activation_checkpointing.by_block(config, parts.backbone.model),
        devices=devices,
        distributed=config.distributed.settled,
    )


def _total_steps(config: RunConfig, fit: Training) -> int:
    """Steps of a run; of a fleet those of the longest of the members that train at once."""
    longest = config.over is not None and not config.over.ships
    return fit.steps if longest else schedules.total_steps(config, fit.rows) or fit.steps


def _require_known(config: RunConfig, devices: int) -> None:
    """Refuse what `plan` knows nothing of; raises ConfigError."""
    over = config.over
    if over is not None and over.inspects is not None:
        raise ConfigError(
            f"recipe={config.recipe}: what a round learns is not written yet. Plan one round: write "
            f"recipe={config.task.name} {config.recipe}={{}} with rows such as it will learn as data.train."
        )
    if over is not None and (over.table is not None or over.folds) and config.task.compares:
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

    return _of_device(config, devices=1, target=PlanTarget(1, memory, elsewhere), way=one_row)


Teaching = Callable[[Any, Loader], Supervise[Any]]
"""From the student's run and what loads the teacher to what the student learns from."""


def _planned_task(config: RunConfig, run: Run) -> DryRunParts:
    if config.over is None:
        return _single(config, run, implementation(config).dry(config, run))
    return plan_fleet.members(config, run) if config.over.adapters else _student(config, run)


def _single(
    config: RunConfig, run: Run, dry: DryTask, teaching: Teaching | None = None, *, live: bool = False
) -> DryRunParts:
    """A run of one adapter.

    Args:
        teaching: What a student learns from.
        live: Whether its teacher is asked in every step.
    """
    whole = config.data.model_copy(update={"length_warm_up": LengthWarmUpConfig()})
    config = config.model_copy(update={"data": whole})  # the longest rows decide about memory
    loader, made = BlueprintLoader(), dry.single
    supervise = None if teaching is None else teaching(made, loader)

    def training(own: RunConfig, run: Run, load: Loader, supervise: Supervise[Any] | None = None) -> SingleTraining:
        mine = replace(made, config=own, run=run)
        backbone = load(own.model, mine.vocabulary, task=mine.task, trainable=isinstance(own.adapter, Full))
        freezer = plan_parts.attached(backbone, own, mine.splits.train, mine.new_token_ids)
        trainer = mine.trainer(backbone, freezer, dry.assemble(mine, freezer.model, backbone), supervise)
        return UnitTraining(trainer) if dry.units else stage_training.of(trainer)

    def carry_out(
        own: RunConfig,
        run: Run,
        loader: BlueprintLoader,
        *,
        decisive: frozenset[str] | None = None,
        evaluates: bool = True,
    ) -> Carried:
        with fake_tensors():
            fit = training(own, run, loader, supervise)
            backbone, *teachers = loader.loaded
            student = dry.assemble(made, fit.model, backbone)
            evaluation = partial(dry.largest, student) if evaluates else None
            seen = [made.splits.train, *([made.splits.held_out] if own.evaluate.every is not None else [])]
            kept = picture_features.kept_bytes(backbone.model, seen) if backbone.model.device.type == "cpu" else 0
            teaching_models = [each.model for each in teachers]
            usage = dry_run(fit, evaluation, others=teaching_models, decisive=decisive, pictures=kept)
            work = replace(step_time.work(fit), teacher=live and supervise is not None)
            if dry.looked or dry.once:
                with torch.no_grad(), Operations() as operations:
                    tokens = dry.read(student)
                work = replace(work, forward=operations.count / tokens, looked=dry.looked * work.tokens, once=dry.once)
        return Carried(backbone, fit, usage, work)

    lengths = made.rows["held_out"].lengths.tobytes()
    return plan_parts.parts(config, made.task, run, carry_out, training, loader=loader, lengths=lengths)


def _student(config: RunConfig, run: Run) -> DryRunParts:
    from workbench.distillation import students
    from workbench.recipes.over import distill, distill_control

    section = config.distill
    base = distill_expansion.student_config(config, run.path)
    source = None if section.peers is not None else distill.find_teacher(config)
    gone = section.answers is not None or section.cache.folder is not None  # by the time the student trains
    if (source is None and not gone) or (section.match and not base.task.tokens):
        raise ConfigError(
            f"recipe={config.recipe}: `plan` knows no peers, and no students of classes whose layers are compared "
            "(distill.match). Plan the student as a run of its own."
        )
    students.make(config, source, run.path / STUDENT, weights=False)
    dry = implementation(base).dry(base, run)
    teaching = None
    if section.asks_teacher:
        # The rows as they are: what the student will write is not known.
        alone = config.model_copy(update={"distill": section.model_copy(update={"on_policy": OnPolicyConfig()})})
        teaching = partial(distill.teaching(base).planned, alone, base, source)
    parts = _single(base, run, dry, teaching, live=base.task.tokens and not gone)
    if source is not None and base.task.tokens and section.asks_teacher and gone:
        writing = _writing_bytes(config, base, source, dry.single)
        most = max(parts.dry_run.evaluation, writing)
        parts = parts._replace(dry_run=replace(parts.dry_run, evaluation=most))
    share = distill_control.share_of_step(config, source, base.model, dry.single.task)
    return parts._replace(work=replace(parts.work, control=share))


def _writing_bytes(config: RunConfig, base: RunConfig, source: TeacherSource, student: SingleRun[Any, Any]) -> int:
    """Bytes alive at most while a teacher is asked for a cache, beside the process."""
    from workbench.distillation import teacher_cache, teachers

    tokenizer = backbones.tokenizer(base.model)
    section, train, loader = teacher_cache.with_k(config.distill), student.splits.train, BlueprintLoader()
    largest = next(micro_batches(np.arange(len(train)), train.lengths, tokens=capacity.FORWARD_TOKENS))
    with fake_tensors(), MemoryLedger(backbones.device().type) as ledger, source.named_in_errors():
        live = teachers.alone(source, base, tokenizer, loader)
        for each in loader.loaded:
            ledger.hold(chain(weight_formats.held(each.model), each.model.buffers()), TEACHER)
        teacher_cache.ask(train.batch(largest).to(backbones.device()), live, section, vocabulary=len(tokenizer))
        return ledger.peak


def of_one_device(config: RunConfig, devices: int, *, accelerated: bool, packs: bool) -> RunConfig:
    """A run of a device's own rows, which an accelerator would compute at once, by one that holds everything.

    Args:
        packs: Whether `auto` may pack rows there, where that pays.
    """
    parts, together = config.distributed.sequence, config.distributed.rows_together

    def share(size: int) -> int:
        return -(-size // max(1, devices // together))

    rows = share(config.batch.size)
    batch = config.batch.model_copy(update={"size": rows})
    for key, may in (("packing", packs), ("shared_prefix", not accelerated)):
        if getattr(batch, key) == "auto" and not may:
            batch = batch.model_copy(update={key: False})
    if accelerated and batch.tokens_per_device == "auto":
        whole = rows * config.data.max_tokens if together == 1 else -(-config.data.max_tokens // parts)
        batch = batch.model_copy(update={"tokens_per_device": whole})
    layout = config.distributed.together_only
    if config.over is not None and not config.over.ships and devices > 1:
        config = fleet_expansion.with_batches(config, share)
    return config.model_copy(update={"batch": batch, "distributed": layout})


def untimed(config: RunConfig) -> RunConfig:
    """The same run without a wall clock, of one epoch where nothing else ends it."""
    if not config.budget.timed:
        return config
    train = config.train if _ends(config) else config.train.model_copy(update={"epochs": 1.0})
    return config.model_copy(update={"budget": BudgetConfig(tokens=config.budget.tokens), "train": train})


def _ends(config: RunConfig) -> bool:
    """Whether something besides a clock ends it."""
    return config.train.steps is not None or config.train.epochs is not None or config.budget.tokens is not None


def clock(config: RunConfig) -> Iterator[str]:
    """Yield a sentence on the end of a run by the clock, which `untimed` took away."""
    if config.budget.timed:
        counted = "of the run that nothing cuts short" if _ends(config) else "of one pass over the rows"
        seconds = config.budget.seconds
        end = "when its Slurm job does" if seconds is None else f"after {units.duration(seconds)}"
        yield f"Steps and their time are those {counted}; the clock ends this one {end} at the latest."


def steps_worth(config: RunConfig, whole: int) -> int:
    """Steps of the members that a plan is for; of a search as many of its first wave as all waves are worth."""
    search = config.search
    if config.over is None or not config.over.own_clock:
        return whole
    halving = Halving(search.eta, search.rungs)
    trainings = halving.cost_of(halving.everything(search.trials))
    return math.ceil(whole * trainings / search.most_at_once)


def notes(config: RunConfig) -> Iterator[str]:
    """Yield sentences on what a plan does not count."""
    if config.over is not None and config.over.own_clock:
        yield "Steps are those of the first wave that the whole search is worth; its comparisons are not counted."
    if config.folds.nested is not None:
        yield f"Figures are those of one flow. {config.folds.nested_cost(steps=config.train.steps is not None)}"
    if config.distributed.sequence > 1:
        yield "The time in which devices exchange heads of attention (distributed.sequence) is not counted."
    if config.model.weights == "int8":
        yield "8-bit layers are taken to find outliers in every column, the most that there may be."
    if config.distributed.deepspeed is not None:
        yield f"What {config.distributed.deepspeed} asks for is not counted: each device is taken to hold everything."
    if config.distill.on_policy.share:
        yield "Answers that the student writes itself (distill.on_policy) are not counted: they may be longer."
    if config.distill.answers is not None:
        yield "The teacher, which writes answers before the student trains, is not counted, nor the control."
    if config.data.sampling.by == "importance":
        yield "Rows that data.sampling.by=importance looks at are not counted: only the run finds out where that pays."
    if config.batch.growth is not None:
        yield "Steps are counted as they begin: those that batch.growth makes larger take longer than planned."
    if config.data.length_warm_up.start is not None:
        yield "Rows that data.length_warm_up cuts are counted whole: the run is faster than planned."
    if config.grow.is_on:
        yield "Memory is that of all blocks, as after the last grow.at; the time of a step is the mean over the run."
    keeps = config.task.uncached is None and config.freeze.cache in ("auto", "memory")
    if config.freeze.policy != "none" and keeps:
        yield "Outputs of frozen blocks that freeze.cache keeps in memory are not counted: the run says how many."
