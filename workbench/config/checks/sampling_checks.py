"""Settings that do not go with `data.sampling`, or with weights of rows."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.config.sections.run_sections import RunSections


def mistakes(config: RunSections) -> Iterator[str]:
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
    """Where rows cannot be drawn by their losses."""
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
