"""Best checkpoint: the values with the lowest held-out loss or best metric, and those that a run ships."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.config import TrainingSections
from workbench.runs.run_directory import Run
from workbench.training import checkpoints
from workbench.training.checkpoint_parts import Held, SavedTensors
from workbench.training.checkpoints import Progress
from workbench.training.optim.weight_averaging import WeightAverage


def write(run: Run, values: Mapping[str, Held], progress: Progress) -> None:
    """Replace the best checkpoint of a run; each process writes its own part."""
    checkpoints.write(run.best, {"trainable": values}, progress, ranks=run.ranks)


def shipped(
    run: Run, config: TrainingSections, progress: Progress, average: WeightAverage | None
) -> tuple[SavedTensors | WeightAverage | None, str | None]:
    """Where the values are that a run ships, None for those of its last step; and a sentence on these, None without a
    choice.

    Args:
        average: Average of the values along the run, if it has one.
    """
    if config.save.ship == "best":
        which = "the average at step" if progress.best_averaged else "step"
        judge = config.evaluate.judge
        why = "lowest held-out loss" if judge is None else f"best {judge.name}"
        return SavedTensors(run.best), f"Shipping {which} {progress.best_step}, which has the {why}."
    if average is None:
        return None, None
    if progress.averaged:
        return average, "Shipping the average: its held-out loss is lower than that of the last step's values."
    return None, "Shipping the values of the last step: their held-out loss is not above that of their average."
