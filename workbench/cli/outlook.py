"""The course of a run in sentences for `workbench check`: its end, its optimizer, the layers that train."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from workbench.config import RunConfig
from workbench.config.freeze_config import FreezeConfig, Moment
from workbench.report import freeze_plot
from workbench.runs import units
from workbench.training.optim import optimizers

WHOLE = 1000
"""Steps of a run whose own number nobody knows."""


def sentences(config: RunConfig, *, steps: int | None, blocks: int | None) -> list[str]:
    """Sentences on everything that differs from a plain run.

    Args:
        steps: Of the run; None where a budget alone ends it.
        blocks: Transformer blocks of the backbone; None only without freezing.
    """
    notes = [_end(config, steps), _optimizer(config)]
    if config.freeze.policy != "none":
        assert blocks is not None, "nobody can freeze layers of a backbone without any"
        notes.append(f"freeze.policy={config.freeze.policy}: {_layers(config, steps=steps, blocks=blocks)}.")
    return [sentence for sentence in notes if sentence is not None]


def _end(config: RunConfig, steps: int | None) -> str | None:
    """Sentence on the limit that ends the run; None where that is its number of steps."""
    budget = config.budget
    if budget.unlimited:
        return None
    limits = [] if steps is None else [f"{steps:,} steps"]
    limits += [] if budget.tokens is None else [f"{budget.tokens:,} tokens"]
    limits += [] if budget.seconds is None else [units.duration(budget.seconds)]
    limits += ["the time of its Slurm job"] if budget.time == "slurm" else []
    sentence = f"Ends after {_listed(limits, 'or')}{', whichever comes first' if limits[1:] else ''}."
    if budget.timed:
        sentence = f"{sentence[:-1]}; scores and reports are part of the time."
    return sentence


def _optimizer(config: RunConfig) -> str | None:
    """Sentence on the optimizer; None for plain AdamW."""
    settings, rate = config.optimizer, config.train.learning_rate
    parts = []
    if settings.sam is not None:
        parts.append("SAM in each step" if settings.sam_every == 1 else f"SAM every {settings.sam_every:,} steps")
    if settings.sam_reuse is not None:
        parts.append("LookSAM between them")
    if settings.gradient_share is not None:
        parts.append(f"the largest {units.percent(settings.gradient_share)} of the gradient in each step")
    if config.batch.growth is not None:
        parts.append(f"batches that grow with the noise to {config.batch.growth:,} rows at most")
    if settings.lookahead is not None:
        parts.append(f"Lookahead every {settings.lookahead} steps")
    if settings.layer_decay < 1:
        parts.append(f"each layer at {settings.layer_decay:.3g} times the rate of the one above it")
    if settings.scaling != "none":
        parts.append(
            f"learning rate {rate:.3g} of {settings.reference_batch} rows scaled to {optimizers.peak_rate(config):.3g}"
        )
    return f"Optimizer: {', '.join([settings.name, *parts])}." if parts or settings.name != "adamw" else None


def _layers(config: RunConfig, *, steps: int | None, blocks: int) -> str:
    """Which layers a policy lets train, and how much of the work it saves at most."""
    policy = config.freeze
    if policy.observes is not None:
        return f"{freeze_plot.describe(policy, blocks)}{_too_late(policy, steps)}"
    count = steps or WHOLE
    first = policy.plan(Moment(0, 0.0, config.seed), blocks=blocks).trains
    last = policy.plan(Moment(count - 1, (count - 1) / count, config.seed), blocks=blocks).trains
    if policy.fixed:
        sentence = f"{_named([not each for each in first])} of {blocks} never train"
    elif policy.thaws:
        sentence = f"{sum(first)} of {blocks + 2} layers may train at a time, at first {_named(first)}"
    else:
        sentence = f"at first {_named(first)} may train, at the end {_named(last)}"
    share = freeze_plot.frozen_share(freeze_plot.rates(policy, steps=count, blocks=blocks, seed=config.seed))
    return f"{sentence}; {units.percent(share)} of the layer-steps are frozen"


def _too_late(policy: FreezeConfig, steps: int | None) -> str:
    """Where a run is too short for a decision."""
    earliest = policy.interval * policy.judges
    if steps is None or steps > earliest:
        return f", after step {earliest:,} at the earliest"
    return f"; the first decision comes after step {earliest:,}, so that none of {steps:,} steps has a frozen layer"


def _named(layers: Sequence[bool]) -> str:
    """The embeddings, blocks 2 to 4 and the head: the layers that are marked."""
    if all(layers):
        return "all layers"
    names = ["the embeddings"] if layers[0] else []
    spans = list(_spans(layers[1:-1]))
    if spans:
        each = [str(start) if start == end else f"{start} to {end}" for start, end in spans]
        names.append(f"block{'s' if len(spans) > 1 or spans[0][0] < spans[0][1] else ''} {', '.join(each)}")
    return _listed([*names, *(["the head"] if layers[-1] else [])], "and")


def _spans(marked: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """First and last of marked neighbours, counted from 1."""
    start = None
    for number, is_marked in enumerate([*marked, False], start=1):
        if is_marked and start is None:
            start = number
        elif not is_marked and start is not None:
            yield start, number - 1
            start = None


def _listed(names: Sequence[str], word: str) -> str:
    return f" {word} ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
