"""Settings of a run that each are right and do not go together, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.adapters import METHODS, Method
from workbench.adapters.method import HALF_OR_FULL
from workbench.config import task_facts
from workbench.config.checks import (
    block_checks,
    crossval_checks,
    method_checks,
    parallelism_checks,
    row_checks,
    step_checks,
    view_checks,
)
from workbench.config.sections import metrics
from workbench.config.sections.basic_sections import MARGIN, ModelConfig
from workbench.config.sections.cleaning_config import ANSWER_RULES
from workbench.config.sections.optimizer_config import ADAMS
from workbench.config.sections.run_sections import RunSections


def mistakes(config: RunSections) -> Iterator[str]:
    """Contradictions between the sections of a run, one sentence for each."""
    if reason := unable(config.model, config.adapter):
        yield reason
    if config.save.ship == "best" and config.evaluate.every is None:
        yield "save.ship=best needs held-out losses to choose by: write evaluate.every=0.1."
    if config.evaluate.patience is not None and config.save.ship == "last":
        yield "evaluate.patience stops some evaluations after the best one: write save.ship=best as well."
    if config.model.batch_norm == "trained":
        yield (
            "model.batch_norm=trained would normalise each row by those of its micro-batch, so that results would "
            "depend on batch.tokens_per_device and devices; those of the whole batch would have to be known of every "
            "layer before the next one runs, in all of its micro-batches. Write model.batch_norm=frozen. Factors and "
            "biases train with adapter.method=layernorm or full, and image.prepare.standardise=data brings pictures "
            "that are lighter, darker or duller than those of pretraining to a mean and spread of their own."
        )
    budget, method = config.budget, config.adapter.method
    if not budget.unlimited and config.adapter.facts.plans_steps:
        yield (
            f"adapter.method={method} plans over a known number of steps, and budget ends a run earlier. "
            "Leave budget out and write train.steps, or take adapter.method=lora."
        )
    yield from _of_freezing(config)
    yield from config.optimizer.misfits(
        schedule=config.schedule, freeze=config.freeze, batch=config.batch.size, method=config.adapter.method
    )
    yield from config.schedule.misfits(
        folds=config.crossvalidates,
        evaluates=config.evaluate.every is not None,
        timed=config.budget.timed,
        patience=config.evaluate.patience,
    )
    yield from block_checks.of_regularise(config)
    yield from method_checks.of_alora(config)
    yield from block_checks.of_thinning(config)
    yield from block_checks.of_stacking(config)
    yield from _of_averages(config)
    yield from _of_sources(config)
    data = config.data
    shares = None if data.own_share is None else data.sources
    for key, files in {"held_out": data.held_out, "test": data.test, "sources": shares}.items():
        if not isinstance(files, dict):
            continue
        if config.task.head == "hidden" and (sizes := {str(size) for size in config.embed.sizes} & files.keys()):
            yield (
                f"data.{key}.{min(sizes)}: scores of a set and of embeddings of embed.sizes would have one name. "
                "Give the set another one."
            )
        rewards = {"mean", *(each.name for each in config.rewards)} if config.task.generates_rows else set()
        if same := rewards & files.keys():
            kind = "source" if key == "sources" else "set"
            yield (
                f"data.{key}.{min(same)}: mean rewards of a {kind} and of a reward would have one name. "
                f"Give the {kind} another one."
            )
    yield from row_checks.of_curriculum(config)
    yield from row_checks.of_augmentation(config)
    yield from row_checks.of_length_warm_up(config)
    yield from step_checks.of_long_rows(config)
    yield from step_checks.of_kernels(config)
    yield from step_checks.of_rounding(config)
    yield from row_checks.of_sampling(config)
    yield from parallelism_checks.mistakes(config)
    yield from step_checks.of_checkpointing(config)
    yield from method_checks.of_sparsity(config)
    yield from row_checks.of_batch_growth(config)
    yield from step_checks.of_curvature(config)
    yield from row_checks.of_fold(config)
    yield from _of_task(config)
    answers = [rule for rule in config.data.clean if rule in ANSWER_RULES]
    if answers and not config.task.answers and not config.media:
        yield (
            f"data.clean={', '.join(answers)} judges answers to prompts, and recipe={config.recipe} reads texts "
            "without any. Leave it out of data.clean."
        )
    trained = {own.train for own in config.data.training_files.values()}
    if trained & set(config.data.held_out_files.values()):
        yield "data.held_out names the training file. Write a share such as data.held_out=0.05."
    if trained & set(config.data.decontaminate.against):
        yield "data.decontaminate.against names the training file, which holds all of itself. Name evaluation files."
    target = config.data.select.target
    if target in {*config.data.held_out_files.values(), *config.data.test_files.values()}:
        yield (
            f"data.select.target={target} is scored too: rows that were chosen by it make its scores too good. "
            "Name other rows of its kind."
        )
    if config.data.select.by_backbone and not config.task.own_choice and not config.crossvalidates:
        yield from _of_choosing_backbones(config)
    if config.data.drop_suspects and not config.crossvalidates:
        yield (
            f"data.drop_suspects needs predictions out of fold, and recipe={config.recipe} makes none. "
            "Write recipe=crossval, or leave it out."
        )
    if config.evaluate.dynamics is True and not config.task.records_losses:
        able = task_facts.names(lambda each: each.records_losses)
        yield (
            f"evaluate.dynamics is for recipe={able}|crossval; recipe={config.recipe} records no losses of rows. "
            "Leave it out."
        )
    yield from crossval_checks.mistakes(config) if config.crossvalidates else ()
    yield from view_checks.mistakes(config)


def unable(model: ModelConfig, adapter: Method) -> str | None:
    """Why a method does not go with how the backbone is loaded, and what to write instead; None where it does."""
    facts, method = adapter.facts, adapter.method
    possible = HALF_OR_FULL if model.weights == "auto" else (model.weights,)
    if not set(possible) <= set(facts.weights):
        return (
            f"adapter.method={method} does not work over {model.weights} weights: {facts.why_weights}. "
            f"Write model.weights={'|'.join(facts.weights)}, or adapter.method=lora."
        )
    if model.sparsity is not None and (reason := method_checks.unprunable(model, adapter)):
        return reason
    if model.new_tokens and not facts.token_rows:
        able = ", ".join(sorted(name for name, each in METHODS.items() if each.about[name].token_rows))
        return f"model.new_tokens trains single rows; adapter.method={method} cannot. Able: {able}."
    return None


def _of_freezing(config: RunSections) -> Iterator[str]:
    freeze, method = config.freeze, config.adapter.method
    if freeze.policy != "none" and (reason := config.adapter.facts.no_freezing):
        yield (
            f"freeze.policy={freeze.policy} does not go with adapter.method={method}: {reason}. "
            "Leave freeze out, or take adapter.method=lora or full."
        )
    if freeze.policy != "none" and config.model.new_tokens:
        yield (
            f"model.new_tokens train rows of the embeddings, which freeze.policy={freeze.policy} freezes. "
            "Leave one of them out."
        )
    if freeze.cache in ("memory", "disk"):
        if freeze.policy == "none" and not config.adapter.facts.no_freezing:
            yield (
                f"freeze.cache={freeze.cache} keeps what frozen blocks give, and freeze.policy=none freezes none. "
                "Write freeze.policy=static, or leave freeze.cache out."
            )
        if config.model.dropout:
            yield (
                f"freeze.cache={freeze.cache} keeps what frozen blocks give, and with model.dropout they give "
                "something else each time. Write model.dropout=false, or freeze.cache=off."
            )
        if not freeze.fixed and config.adapter.noise:
            yield (
                f"freeze.cache={freeze.cache} keeps what frozen blocks give, and freeze.policy={freeze.policy} freezes "
                "adapters with adapter.dropout among them. Write adapter.dropout=0, or freeze.cache=off."
            )
        if not freeze.fixed and config.adapter.facts.draws:
            yield (
                f"freeze.cache={freeze.cache} keeps what frozen blocks give, and freeze.policy={freeze.policy} freezes "
                f"adapters of adapter.method={config.adapter.method}, which draw numbers each time. Write "
                "freeze.cache=off."
            )
        if config.task.uncached:
            yield (
                f"freeze.cache={freeze.cache} keeps what frozen blocks give for single rows, and "
                f"recipe={config.recipe} {config.task.uncached}. Write freeze.cache=off."
            )


def _of_sources(config: RunSections) -> Iterator[str]:
    data = config.data
    if not data.sources:
        return
    if data.mix.by == "learned" and config.task.compares:
        yield (
            f"data.mix.by=learned compares sources by losses of single rows, and recipe={config.recipe} compares "
            f"{config.task.compares}. Write data.mix.by=size or weight."
        )
    if data.mix.batches == "one_source":
        if not config.task.one_source_batches and not config.crossvalidates:  # which has a sentence of its own
            yield (
                "data.mix.batches=one_source is for recipe=embed, whose loss compares the rows of a batch; "
                f"recipe={config.recipe} has losses of single rows. Leave it out."
            )
        limited = [name for name, source in config.data.sources.items() if source.passes is not None]
        if limited:
            yield (
                f"data.sources.{limited[0]}.passes counts rows, and data.mix.batches=one_source draws whole batches. "
                "Leave one of them out."
            )
    if data.curriculum.by != "none":
        yield "data.curriculum orders the rows of one source; data.sources mixes several. Leave one of them out."
    if config.classes.sampling not in ("auto", "none") and not config.crossvalidates:
        yield (
            f"classes.sampling={config.classes.sampling} draws rows by their class, and data.sources by their source. "
            "Leave classes.sampling out; classes.weights=balanced weighs rare classes in the loss."
        )


def _of_averages(config: RunSections) -> Iterator[str]:
    average = config.average.method
    if average == "none":
        return
    if config.evaluate.every is None and not config.crossvalidates:
        yield (
            f"average.method={average} ships the average where its held-out loss is the lower one, and "
            "evaluate.every=null measures none. Write evaluate.every=0.25, or leave average out."
        )
    if config.optimizer.name == "schedule_free" or config.optimizer.lookahead is not None:
        yield f"average.method={average} beside an optimizer that averages already. Leave one of them out."
    if average == "ema" and config.adapter.method == "adalora":
        yield (
            "average.method=ema would keep traces of ranks that adapter.method=adalora took back. "
            "Write average.method=lawa, or adapter.method=lora."
        )


def _of_task(config: RunSections) -> Iterator[str]:
    """Sections that other tasks and recipes read, and what the task's own facts refuse."""
    task = config.task
    for name, recipes in config.sections_of_others.items():
        if config.differs(name):
            yield f"{name} is for recipe={'|'.join(recipes)}; recipe={config.recipe} has none. Leave {name} out."
    if config.media and config.data.format not in task.media:
        able = task_facts.names(lambda each: config.data.format in each.media)
        yield (
            f"data.format={config.data.format} is for recipe={able}|crossval; recipe={config.recipe} reads text. Leave "
            "it out."
        )
    if any(MARGIN in each.columns for each in config.data.training_files.values()) and not task.margins:
        able = task_facts.names(lambda each: each.margins)
        yield f"data.columns.margin is for recipe={able}; recipe={config.recipe} compares no answers. Leave it out."
    for key, sentence in task.refuses.items():
        if config.given(key):
            yield sentence.format(key=key, recipe=f"recipe={config.recipe}")
    if config.train.start is not None and task.start != "train":
        own = f"Write {task.start}.start instead" if task.start else "Leave it out"
        yield f"train.start is for recipe={task_facts.names(lambda each: each.start == 'train')}. {own}."
    yield from _of_metric(config)
    yield from task.check(config) if task.check is not None else ()


def _of_metric(config: RunSections) -> Iterator[str]:
    judge, kind = config.evaluate.judge, config.task.judged(config)
    if judge is None:
        return
    if kind is None:
        yield (
            f"evaluate.metric={config.evaluate.metric} judges labels of rows, and recipe={config.recipe} has none. "
            f"It is judged by {config.task.score}: leave evaluate.metric out."
        )
    elif judge.file is None and kind not in judge.metric.kinds:
        yield (
            f"evaluate.metric={judge.name} does not apply to classes.kind={kind}. Write one of {metrics.names(kind)}."
        )


def _of_choosing_backbones(config: RunSections) -> Iterator[str]:
    by, distributed, at_random = config.data.select.by, config.distributed, config.data.select.random_instead
    if by not in config.task.chooses:
        able = task_facts.names(lambda each: by in each.chooses)
        yield f"data.select.by={by} is for recipe={able}, not for recipe={config.recipe}. Write {at_random}."
        return
    if config.data.sources:
        yield f"data.select.by={by} chooses from one source; data.sources mixes several. Leave one of them out."
    if distributed.sharded:
        yield (
            f"data.select.by={by} asks the whole backbone on each device, and distributed cuts it. "
            f"Write distributed.zero=0, or {at_random}."
        )
    if by == "gradient" and config.optimizer.name not in ADAMS:
        yield (
            f"data.select.by=gradient reads Adam's moments, and optimizer.name={config.optimizer.name} has others. "
            "Write optimizer.name=adamw, or data.select.by=importance."
        )
    if by == "gradient" and config.adapter.method == "full":
        yield "data.select.by=gradient compares gradients of an adapter, not of adapter.method=full. Write lora."
