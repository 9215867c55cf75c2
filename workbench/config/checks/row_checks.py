"""What does not go with how rows are drawn: order, sampling, folds, streaming, a growing batch, rewritten texts."""

from __future__ import annotations

import math
from collections.abc import Iterator

from workbench.config import task_facts
from workbench.config.sections.run_sections import RunSections
from workbench.config.task_facts import names


def of_curriculum(config: RunSections) -> Iterator[str]:
    """Contradictions to `data.curriculum`, one sentence for each."""
    by = config.data.curriculum.by
    if by == "none":
        return
    if config.train.epochs is None and config.train.steps is None and not config.budget.unlimited:
        yield (
            "data.curriculum opens rows over a known number of steps, and budget alone ends the run. "
            "Write train.epochs or train.steps too."
        )
    if config.media and by == "length":
        yield (
            f"data.curriculum.by=length: all rows with data.format={config.data.format} are equally long. Write "
            "data.curriculum.by=column, or leave data.curriculum out."
        )
    if (sampling := config.classes.sampling) not in ("auto", "none"):
        yield (
            f"data.curriculum draws each row equally often, and classes.sampling={sampling} does not. "
            "Leave one of them out; classes.weights=balanced goes with a curriculum."
        )
    if config.data.curriculum.measured:
        if by not in config.task.difficulties or config.over is not None:
            able = next(task for task in task_facts.TASKS.values() if by in task.difficulties)
            others = [*(() if config.over else config.task.difficulties), "length", "column"]
            yield (
                f"data.curriculum.by={by} {able.difficulties[by]}, which is for recipe={able.name}, not for "
                f"recipe={config.recipe}. Write data.curriculum.by={', '.join(others)} or function."
            )
        if by == "loss" and config.classes.kind != "one":
            yield (
                "data.curriculum.by=loss asks a linear probe for one class a row, and "
                f"classes.kind={config.classes.kind} has none. Write data.curriculum.by=column, function or self_paced."
            )
        if config.distributed.sharded:
            yield (
                f"data.curriculum.by={by} asks the whole backbone on each device, and distributed cuts it. "
                f"Write distributed.zero=0, or data.curriculum.by=length."
            )
    if by == "self_paced" and config.optimizer.noise_scale is not None:
        yield (
            "optimizer.noise_scale measures rows that are drawn evenly. Leave it out, or write "
            "data.curriculum.by=length."
        )


def curriculum_refusal(config: RunSections, recipe: str) -> str | None:
    """Why a recipe that trains several models, or with a teacher, cannot carry out the curriculum; None where it can.

    Args:
        recipe: In words.
    """
    by = config.data.curriculum.by
    if config.data.curriculum.measured or by == "self_paced":
        return (
            f"by={by} asks the one model that trains, and {recipe} has several. Write data.curriculum.by=length, "
            "column or function."
        )
    return None


def of_sampling(config: RunSections) -> Iterator[str]:
    """Contradictions, one sentence for each."""
    if config.data.weighs and config.data.mix.by == "learned":
        yield (
            "data.mix.by=learned compares sources by losses in which each token counts once, and data.columns.weight "
            "says otherwise. Leave one of them out."
        )
    sampling = config.data.sampling
    if sampling.by == "all":
        return
    if sampling.draws:
        yield from _of_drawing(config)
    elif config.data.mix.by == "learned":
        yield "data.mix.by=learned follows losses of rows drawn evenly. Leave it or data.sampling out."
    elif config.data.curriculum.by == "self_paced":
        yield (
            "data.curriculum.by=self_paced follows losses of rows that count alike, and data.sampling.by="
            f"{sampling.by} has them count unequally. Write data.curriculum.by=length, or leave one of them out."
        )
    if sampling.by == "tokens":
        if why := config.task.token_sampling:
            sentence = f"data.sampling.by=tokens is for recipe=sft; recipe={config.recipe} {why}."
            yield f"{sentence} Write data.sampling.by=tilted."
        if config.distributed.sharded:
            yield (
                "data.sampling.by=tokens asks a whole reference on each device before the training, and distributed "
                "cuts what does not fit. Write distributed.zero=0."
            )
    if config.optimizer.noise_scale is not None:
        yield "optimizer.noise_scale measures rows that are drawn evenly. Leave it or data.sampling out."


def _of_drawing(config: RunSections) -> Iterator[str]:
    by = config.data.sampling.by
    if config.data.curriculum.by != "none":
        yield "data.sampling and data.curriculum both say which rows a step takes. Leave one of them out."
    if config.data.sources:
        yield "data.sampling draws from one source; data.sources mixes several. Leave one of them out."
    if (sampling := config.classes.sampling) not in ("auto", "none"):
        yield (
            f"data.sampling and classes.sampling={sampling} both say how often a row comes. "
            "Leave one of them out; classes.weights=balanced goes with data.sampling."
        )
    endless = config.train.epochs is None and config.train.steps is None and not config.budget.unlimited
    if by != "importance" and endless:
        yield (
            f"data.sampling.by={by} draws all rows again towards the end, and budget alone ends the run. "
            "Write train.epochs or train.steps too."
        )


def of_length_warm_up(config: RunSections) -> Iterator[str]:
    """Contradictions to `data.length_warm_up`, one sentence for each."""
    if config.data.length_warm_up.start is None:
        return
    if not config.task.shares_prefixes:
        yield (
            "data.length_warm_up cuts texts that a model learns to write, which is for recipe=sft, not for "
            f"recipe={config.recipe}. Leave data.length_warm_up out."
        )
    if config.train.epochs is None and config.train.steps is None and not config.budget.unlimited:
        yield (
            "data.length_warm_up grows over a known number of steps, and budget alone ends the run. "
            "Write train.epochs or train.steps too."
        )
    if config.data.sources:
        yield (
            "data.length_warm_up cuts rows of one source; data.sources mixes several, by their tokens. Leave one of "
            "them out."
        )
    if config.data.sampling.by != "all":
        yield (
            "data.sampling weighs rows by all their tokens, of which data.length_warm_up cuts some. Leave one of them "
            "out."
        )
    if config.freeze.cache in ("memory", "disk"):
        yield (
            f"freeze.cache={config.freeze.cache} keeps what frozen blocks give for whole rows, and data.length_warm_up "
            "cuts them. Write freeze.cache=off, or leave data.length_warm_up out."
        )


def length_refusal(config: RunSections, recipe: str) -> str | None:
    """Why a recipe that trains several models, or with a teacher, cannot cut rows; None where it is not asked to."""
    if config.data.length_warm_up.start is None:
        return None
    return f"is for recipe=sft; the models of {recipe} read whole rows. Leave it out."


def of_fold(config: RunSections) -> Iterator[str]:
    """Contradictions to `data.fold`, one sentence for each."""
    data, fold = config.data, config.data.fold
    if fold.of is None:
        if fold != type(fold)():
            yield "data.fold says what is held out, and not of how many folds. Write data.fold.of=5 as well."
        return
    ordered = [f"data.fold.{name}" for name in ("group", "column", "time") if getattr(fold, name)]
    if ordered and data.sources:
        yield f"{ordered[0]} names a column of one file, and data.sources names several. Write data.train=FILE."
    if not config.task.folds or (config.over is not None and not config.crossvalidates):
        why = f"recipe={config.recipe} does not read it"
        yield f"data.fold is for recipe={names(lambda task: task.folds)}: {why}. Leave data.fold out."
    if fold.number >= fold.of:
        yield f"data.fold.number={fold.number} is none of {fold.of} folds, which are numbered from 0 to {fold.of - 1}."
    if data.differs("held_out"):
        yield "data.fold holds out a fold of data.train in place of data.held_out. Leave one of them out."
    if data.streaming.on:
        yield "data.fold looks at all rows, and data.streaming reads a part of them. Leave one of them out."


def of_streaming(config: RunSections) -> Iterator[str]:
    """Contradictions to `data.streaming`, one sentence for each."""
    data = config.data
    if not data.streaming.on:
        return
    if config.media:
        yield f"data.streaming reads rows of text, and data.format={config.data.format} none. Leave data.streaming out."
    endless = [name for name, own in data.training_files.items() if own.limit is None]
    if data.sources and endless:
        yield f"data.streaming reads a part of each source. Write data.sources.{endless[0]}.limit=ROWS."
    elif endless and config.crossvalidates:
        yield "data.streaming reads a part of the rows, and recipe=crossval folds all of them. Write data.limit=ROWS."
    elif endless and data.select.by != "all":
        yield "data.select chooses among more rows than the run draws. Write data.limit=ROWS, how many are streamed."
    elif endless and config.train.steps is None:
        yield "data.streaming reads as many rows as the run draws: write train.steps, or data.limit=ROWS."


def streamed_rows(config: RunSections) -> dict[str, int]:
    """Rows that are read of each source of training rows, by its name, which is empty where there is one."""
    data = config.data
    drawn = (config.train.steps or 0) * config.batch.size
    kept = 1 - (data.own_share or 0)
    return {name: own.limit or math.ceil(drawn / kept) + 1 for name, own in data.training_files.items()}


def of_batch_growth(config: RunSections) -> Iterator[str]:
    """Contradictions, one sentence for each."""
    growth, size = config.batch.growth, config.batch.size
    if growth is None:
        return
    if growth <= size:
        yield f"batch.growth={growth} is no growth from batch.size={size}. Write batch.growth={8 * size}."
    if config.optimizer.noise_scale is None:
        yield "batch.growth follows the measured noise scale. Write optimizer.noise_scale=10 as well."
    if config.train.steps is None and (config.train.epochs is not None or config.budget.unlimited):
        yield (
            "batch.growth leaves open how many steps an epoch has. Write train.steps, or train.epochs=null and "
            "budget.tokens or budget.time."
        )
    if config.data.curriculum.by != "none":
        yield "batch.growth and data.curriculum both say which rows a step takes. Leave one of them out."
    if config.data.mix.by == "learned":
        yield "batch.growth and data.mix.by=learned both say which rows a step takes. Leave one of them out."
    if config.over is not None and config.over.table is not None:
        yield f"batch.growth differs from run to run, and recipe={config.recipe} compares runs. Leave it out."


def of_augmentation(config: RunSections) -> Iterator[str]:
    """Contradictions to `data.augment`, one sentence for each."""
    if not config.data.augment.is_on:
        return
    if config.task.tokens:
        yield (
            f"data.augment rewrites texts that are read, and recipe={config.recipe} learns to write its texts: what it "
            "puts into them would be learnt. It is for recipe=classify|crossval. Leave data.augment out."
        )
    elif config.media:
        name = config.data.format
        yield f"data.augment rewrites words, and rows with data.format={name} have none. Write {name}.augment instead."
    elif config.classes.kind == "pair":
        yield (
            "data.augment makes one of two responses worse than it is, which may change which is better "
            "(classes.kind=pair). Leave data.augment out."
        )
    if config.freeze.cache in ("memory", "disk"):
        yield (
            f"freeze.cache={config.freeze.cache} keeps what frozen blocks give, and data.augment rewrites rows in each "
            "pass, so that none comes twice. Write freeze.cache=off, or leave data.augment out."
        )
