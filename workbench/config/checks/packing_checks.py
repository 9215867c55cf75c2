"""Settings under which the rows of a micro-batch cannot be packed into one sequence, or share their beginning."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.config.sections.run_sections import RunSections, TrainingSections
from workbench.config.task_facts import names


def mistakes(config: RunSections) -> Iterator[str]:
    """Contradictions to `batch.packing=true` and `batch.shared_prefix=true`, one sentence for each."""
    if config.batch.packing is True and config.distill.match:
        yield (
            "batch.packing=true does not go with distill.match, which compares the layers of padded rows. "
            "Write batch.packing=auto, or leave that out."
        )
    for key, reasons in {"packing": unpackable, "shared_prefix": unsharable}.items():
        for why, cure in reasons(config) if getattr(config.batch, key) is True else ():
            yield f"batch.{key}=true {why}. Write batch.{key}=auto{cure and f', or {cure}'}."


def unsharable(config: TrainingSections) -> Iterator[tuple[str, str]]:
    """Yield each reason for which what rows begin with cannot be computed once for them, and what to write instead."""
    if not config.task.shares_prefixes or config.over is not None:
        able = names(lambda task: task.shares_prefixes)
        yield f"is for recipe={able}, and recipe={config.recipe} computes each row by itself", ""
        return
    if config.batch.packing is False:
        yield "lays rows one after another, and batch.packing=false forbids it", "batch.packing=auto"
    if config.adapter.noise:
        yield "computes a token once for many rows, and adapter.dropout draws for each row", "adapter.dropout=0"
    if config.adapter.facts.draws:
        method = config.adapter.method
        yield (
            f"computes a token once for many rows, and adapter.method={method} draws for each row",
            "adapter.method=lora",
        )
    if config.optimizer.name == "sophia":
        yield (
            "computes a token once for many rows, and optimizer.name=sophia draws for each row",
            "optimizer.name=adamw",
        )
    if config.model.dropout:
        yield "computes a token once for many rows, and model.dropout draws for each row", "model.dropout=false"
    if config.distributed.sequence > 1:
        yield "keeps a row's tokens together, and distributed.sequence parts them", "distributed.sequence=1"
    yield from unpackable(config)


def unpackable(config: TrainingSections) -> Iterator[tuple[str, str]]:
    """Yield each reason for which rows cannot be packed, and what to write instead of its cause, if there is anything.

    A sentence about `batch.packing=true` ends with the reason.
    """
    if not config.task.packs:
        yield f"is for recipe={names(lambda task: task.packs)}, and recipe={config.recipe} trains on padded rows", ""
    if config.media:
        yield f"packs rows of text, and rows with data.format={config.data.format} have no padding", ""
    if reason := config.adapter.facts.no_packing:
        yield f"does not go with adapter.method={config.adapter.method}: {reason}", "adapter.method=lora"
    if config.model.attention not in ("auto", "sdpa"):
        yield f"needs sdpa, and model.attention={config.model.attention} is another kernel", "model.attention=auto"
    if config.regularise.noisy:
        yield (
            "does not go with regularise.neftune and stochastic_depth, which draw their noise for padded rows",
            "leave the two out",
        )
    if config.regularise.r_drop:
        yield "does not go with regularise.r_drop, which lays padded rows twice", "leave that out"
    if config.token_drop.is_on:
        yield "does not go with token_drop, which drops tokens of padded rows", "leave that out"
    if config.grow.is_on and config.task.head == "classes":
        yield (
            "does not go with grow, for which another block is the last one before the head at first",
            "leave that out",
        )
    if config.train.compile:
        yield (
            "does not go with train.compile, which would compile again for each combination of lengths",
            "train.compile=false",
        )
    if config.distributed.sharded:
        yield "reads weights that are whole, and distributed cuts them", "distributed.zero=0"
