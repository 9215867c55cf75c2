"""Early stopping: what a held-out evaluation changes in the progress of a run, and when it ends the run.

`evaluate.patience` ends a run after so many evaluations in a row without a lower held-out loss, or a better
`evaluate.metric`; the schedule `plateau` lowers the learning rate after `schedule.waits` of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from workbench.config import EvaluateConfig
from workbench.config.sections.schedule_config import ScheduleConfig
from workbench.training.checkpoints import Progress
from workbench.training.optim import schedules

METRIC = "held_out_metric"
"""The value of `evaluate.metric` in a line of metrics.jsonl."""


def criterion(record: Mapping[str, Any], evaluate: EvaluateConfig) -> float:
    """What is to be low in a line of metrics.jsonl: the held-out loss, or in its place the metric with its sign."""
    if evaluate.judge is None:
        return float(record["held_out_loss"])
    value = float(record.get(METRIC, math.nan))
    return math.inf if math.isnan(value) else -value if evaluate.judge.higher else value


def criterion_name(evaluate: EvaluateConfig) -> str:
    """What `criterion` is, for a page: `loss`, or the metric with its sign, such as `-accuracy`."""
    return "loss" if evaluate.judge is None else "-" * evaluate.judge.higher + evaluate.judge.name


def out_of_patience(progress: Progress, patience: int | None) -> bool:
    """Whether a run ends for want of a lower held-out loss; never where `patience` is None."""
    return patience is not None and progress.evaluations_without_gain >= patience


def evaluated(progress: Progress, loss: float, *, averaged: bool, schedule: ScheduleConfig) -> Progress:
    """Progress after an evaluation.

    Args:
        loss: Held-out loss, nats per token, or what `criterion` has in its place; of the average of the values, where
            that is the lower one.
        averaged: Whether it is the average's.
    """
    if progress.best_loss is None or loss < progress.best_loss:
        best = replace(progress, best_loss=loss, best_step=progress.step, best_averaged=averaged, averaged=averaged)
        return replace(best, evaluations_without_gain=0, dropped_at=0)
    stalled = progress.evaluations_without_gain + 1
    after = replace(progress, averaged=averaged, evaluations_without_gain=stalled)
    if schedules.drop_due(stalled, progress.dropped_at, schedule):
        return replace(after, drops=progress.drops + 1, dropped_at=stalled)
    return after


def without_history(progress: Progress) -> Progress:
    """The same place in the run with another model, whose held-out losses do not compare with earlier ones."""
    fresh = replace(progress, best_loss=None, best_step=None, best_averaged=False, averaged=False)
    return replace(fresh, evaluations_without_gain=0, dropped_at=0)
