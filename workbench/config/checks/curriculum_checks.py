"""Settings of a run under which its rows cannot be drawn in an order of difficulty."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.config import task_facts
from workbench.config.sections.run_sections import RunSections

KEY = "data.curriculum"


def mistakes(config: RunSections) -> Iterator[str]:
    """Contradictions to `data.curriculum`, one sentence for each."""
    by = config.data.curriculum.by
    if by == "none":
        return
    if config.train.epochs is None and config.train.steps is None and not config.budget.unlimited:
        yield (
            f"{KEY} opens rows over a known number of steps, and budget alone ends the run. "
            "Write train.epochs or train.steps too."
        )
    if config.reads_pictures and by == "length":
        yield f"{KEY}.by=length: all pictures have as many patches. Write {KEY}.by=column, or leave {KEY} out."
    if (sampling := config.classes.sampling) not in ("auto", "none"):
        yield (
            f"{KEY} draws each row equally often, and classes.sampling={sampling} does not. "
            "Leave one of them out; classes.weights=balanced goes with a curriculum."
        )
    if config.data.curriculum.measured:
        yield from _of_asking_backbones(config)
    if by == "self_paced" and config.optimizer.noise_scale is not None:
        yield f"optimizer.noise_scale measures rows that are drawn evenly. Leave it out, or write {KEY}.by=length."


def _of_asking_backbones(config: RunSections) -> Iterator[str]:
    """Where no backbone can say before the training how hard a row is."""
    by = config.data.curriculum.by
    if by not in config.task.difficulties or config.over is not None:
        able = next(task for task in task_facts.TASKS.values() if by in task.difficulties)
        others = [*(() if config.over else config.task.difficulties), "length", "column"]
        yield (
            f"{KEY}.by={by} {able.difficulties[by]}, which is for recipe={able.name}, not for recipe={config.recipe}. "
            f"Write {KEY}.by={', '.join(others)} or function."
        )
    if by == "loss" and config.classes.kind != "one":
        yield (
            f"{KEY}.by=loss asks a linear probe for one class a row, and classes.kind={config.classes.kind} has none. "
            f"Write {KEY}.by=column, function or self_paced."
        )
    if config.distributed.sharded:
        yield (
            f"{KEY}.by={by} asks the whole backbone on each device, and distributed cuts it. "
            f"Write distributed.zero=0, or {KEY}.by=length."
        )


def refusal(config: RunSections, recipe: str) -> str | None:
    """Why a recipe that trains several models, or with a teacher, cannot carry out the curriculum; None where it can.

    Args:
        recipe: In words.
    """
    by = config.data.curriculum.by
    if config.data.curriculum.measured or by == "self_paced":
        return f"by={by} asks the one model that trains, and {recipe} has several. Write by=length, column or function."
    return None
