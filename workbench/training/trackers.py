"""Where metrics go besides metrics.jsonl: services that accelerate knows, each by its own package."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from accelerate import Accelerator

from workbench.config import TrainingSections
from workbench.config.sections.sweep_config import flat
from workbench.runs.run_directory import Run

PROJECT = "peft-workbench"
"""The project of all runs, unless WANDB_PROJECT or, for mlflow, MLFLOW_EXPERIMENT_NAME names another one."""
_NAMED = {"wandb": "name", "mlflow": "run_name", "trackio": "name", "swanlab": "experiment_name"}
"""How each service calls the name of a run."""


class Trackers:
    """Those that `trackers` names, told of the settings at once and of every step. Each resume is a run of its own."""

    def __init__(self, config: TrainingSections, run: Run, *, cpu: bool) -> None:
        self._accelerator = Accelerator(cpu=cpu, log_with=list(config.trackers) or None, project_dir=run.path)
        if config.trackers:
            settings = {key: _plain(value) for key, value in flat(config.model_dump(mode="json")).items()}
            named = {service: {word: run.path.name} for service, word in _NAMED.items()}
            self._accelerator.init_trackers(project(config.trackers), settings, init_kwargs=named)

    def log(self, record: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl."""
        numbers = {key: value for key, value in record.items() if key != "step" and isinstance(value, int | float)}
        self._accelerator.log(numbers, step=record["step"])

    def close(self) -> None:
        """Send what is left."""
        for tracker in self._accelerator.trackers:  # the accelerator's own end would part the processes
            tracker.finish()


def project(names: Sequence[str]) -> str:
    """The project of runs that these services hear of."""
    return os.environ.get("WANDB_PROJECT", PROJECT) if "wandb" in names else PROJECT


def _plain(value: Any) -> str | int | float | bool:
    return value if isinstance(value, str | int | float | bool) else str(value)
