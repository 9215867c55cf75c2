"""Small real models of the kind that a run trains, whose blocks `plan` times."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from transformers import PretrainedConfig

from workbench.config import RunConfig
from workbench.models import backbones
from workbench.models.backbones import Backbone, Loader
from workbench.planning import step_time
from workbench.planning.dry_run import DryRun
from workbench.planning.dry_trainings import Training
from workbench.planning.fake_tensors import BlueprintLoader
from workbench.planning.step_time import Measured, Small, Subject
from workbench.runs import files, run_directory
from workbench.runs.run_directory import Run

MakeTraining = Callable[[RunConfig, Run, Loader], Training]
"""Makes the training of a run, with its own rows, over a backbone that the loader gives."""


def measure(config: RunConfig, backbone: Backbone, fit: Training, dry: DryRun, make: MakeTraining) -> step_time.Measure:
    """Times small models of the kind of `backbone`, when it is asked to."""
    hub = backbones.hub_config(config.model)
    subject = Subject(
        depth=step_time.depth(hub),
        narrower=step_time.narrowing(hub, parts=config.distributed.tensor),
        parameters=sum(each.numel() for each in backbone.model.parameters()),
        trainable=sum(each.numel() for each in fit.masters),
        flops=dry.flops_per_token * dry.padded_tokens,
        dtype=backbone.compute,
        packed=backbone.weights in backbones.QUANTISED,
    )
    build = partial(_small_training, config, hub, make)  # a distilled student's folder is gone by then

    def timed(clock: Callable[[], float], seconds: float) -> Measured:
        return step_time.measure(build, subject, clock=clock, seconds=seconds)

    return timed


@contextmanager
def _small_training(config: RunConfig, hub: PretrainedConfig, make: MakeTraining, small: Small) -> Iterator[Training]:
    with tempfile.TemporaryDirectory() as folder:
        model = step_time.smaller(config.model, hub, small, Path(folder) / "model")
        own = config.model_copy(update={"model": model, "trackers": ()})
        with planned_run(own, Path(folder)) as run:
            yield make(own, run, BlueprintLoader())


@contextmanager
def planned_run(config: RunConfig, folder: Path) -> Iterator[Run]:
    """A run directory in `folder` for a training that is never begun, and before which nothing is scored."""
    run = run_directory.start(folder / "run", config, resume=False)
    files.write_json(run.path / "before.json", {})
    try:
        yield run
    finally:
        run.close()
