"""Trackers: services that receive metrics besides metrics.jsonl, through accelerate and their own packages."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from accelerate import Accelerator

from workbench.config import TrainingSections
from workbench.config.sections.search_config import flat
from workbench.runs.run_directory import Run

PROJECT = "peft-workbench"
"""Project of all runs, unless WANDB_PROJECT or, for mlflow, MLFLOW_EXPERIMENT_NAME names another one."""
_NAMED = {"wandb": "name", "mlflow": "run_name", "trackio": "name", "swanlab": "experiment_name"}
"""The keyword of a run's name, by service."""


class Trackers:
    """The services in `trackers`; they receive the settings and every step. A resumed run is a new one there."""

    def __init__(self, config: TrainingSections, run: Run, *, cpu: bool) -> None:
        self._accelerator = Accelerator(cpu=cpu, log_with=list(config.trackers) or None, project_dir=run.path)
        if config.trackers:
            values = flat(config.model_dump(mode="json"))
            settings = {key: each if isinstance(each, str | int | float) else str(each) for key, each in values.items()}
            named = {service: {word: run.path.name} for service, word in _NAMED.items()}
            self._accelerator.init_trackers(project(config.trackers), settings, init_kwargs=named)

    def log(self, record: Mapping[str, Any]) -> None:
        """Send a line of metrics.jsonl."""
        numbers = {key: value for key, value in record.items() if key != "step" and isinstance(value, int | float)}
        self._accelerator.log(numbers, step=record["step"])

    def close(self) -> None:
        """Send what is left."""
        for tracker in self._accelerator.trackers:  # the accelerator's own end would also end the process group
            tracker.finish()


def project(names: Sequence[str]) -> str:
    """The project of runs at these services."""
    return os.environ.get("WANDB_PROJECT", PROJECT) if "wandb" in names else PROJECT
