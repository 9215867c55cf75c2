"""Settings of the run that `plan` carries out for another, and what it does not count."""

from __future__ import annotations

import math
from collections.abc import Iterator

from workbench.config import RunConfig
from workbench.config.expansions import fleet_expansion
from workbench.config.sections.budget_config import BudgetConfig
from workbench.runs import units
from workbench.training.search.halving import Halving


def of_one_device(config: RunConfig, devices: int, *, accelerated: bool) -> RunConfig:
    """A run of a device's own rows, which an accelerator would compute at once, by one that holds everything."""
    parts, together = config.distributed.sequence, config.distributed.rows_together

    def share(size: int) -> int:
        return -(-size // max(1, devices // together))

    rows = share(config.batch.size)
    batch = config.batch.model_copy(update={"size": rows})
    for key in ("packing", "shared_prefix") if accelerated else ():
        if getattr(batch, key) == "auto":  # rows are packed on CPUs
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
    if config.distributed.sequence > 1:
        yield "The time in which devices exchange heads of attention (distributed.sequence) is not counted."
    if config.distributed.tensor > 1:
        yield "The time in which devices add up outputs of blocks (distributed.tensor) is not counted."
    if config.model.weights == "int8":
        yield "8-bit layers are taken to find outliers in every column, the most that there may be."
    if config.distributed.deepspeed is not None:
        yield f"What {config.distributed.deepspeed} asks for is not counted: each device is taken to hold everything."
    if config.distill.on_policy.share:
        yield "Answers that the student writes itself (distill.on_policy) are not counted: they may be longer."
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
