"""Settings of a run under which its rows cannot be cut to a growing length."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.config.sections.run_sections import RunSections

KEY = "data.length_warm_up"


def mistakes(config: RunSections) -> Iterator[str]:
    """Contradictions to `data.length_warm_up`, one sentence for each."""
    if config.data.length_warm_up.start is None:
        return
    if not config.task.shares_prefixes:
        yield (
            f"{KEY} cuts texts that a model learns to write, which is for recipe=sft, not for recipe={config.recipe}. "
            f"Leave {KEY} out."
        )
    if config.train.epochs is None and config.train.steps is None and not config.budget.unlimited:
        yield (
            f"{KEY} grows over a known number of steps, and budget alone ends the run. "
            "Write train.epochs or train.steps too."
        )
    if config.data.sources:
        yield f"{KEY} cuts rows of one source; data.sources mixes several, by their tokens. Leave one of them out."
    if config.data.sampling.by != "all":
        yield f"data.sampling weighs rows by all their tokens, of which {KEY} cuts some. Leave one of them out."
    if config.freeze.cache in ("memory", "disk"):
        yield (
            f"freeze.cache={config.freeze.cache} keeps what frozen blocks give for whole rows, and {KEY} cuts them. "
            f"Write freeze.cache=off, or leave {KEY} out."
        )


def refusal(config: RunSections, recipe: str) -> str | None:
    """Why a recipe that trains several models, or with a teacher, cannot cut rows; None where it is not asked to."""
    if config.data.length_warm_up.start is None:
        return None
    return f"is for recipe=sft; the models of {recipe} read whole rows. Leave it out."
