"""Outcome of the dry run of a training, of any recipe."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from transformers import PretrainedConfig

from workbench.adapters import anatomy
from workbench.config import RunConfig
from workbench.config.model_heads import ModelHead
from workbench.data.batching import Examples, first_rows
from workbench.errors import ConfigError
from workbench.models import backbones, model_sizes
from workbench.models.backbones import Backbone, Loader
from workbench.models.model_sizes import AdapterSize
from workbench.planning import step_time
from workbench.planning.dry_run import OPTIMIZER, DryRun
from workbench.planning.dry_trainings import Training
from workbench.planning.fake_tensors import BlueprintLoader
from workbench.planning.sharded_memory import Contents, contents_of
from workbench.planning.step_time import Measured, Small, StepWork, Subject
from workbench.runs import files, process_memory, run_directory
from workbench.runs.run_directory import Run
from workbench.training.freezing import freezer as freezing
from workbench.training.freezing.freezer import Freezer


def libraries() -> int:
    """Bytes of Python and of all that a run imports until its report is written, on a CPU; imports what is missing."""
    import workbench.evaluation.training_dynamics
    import workbench.report.pages  # noqa: F401

    importlib.import_module("sklearn.metrics")
    return process_memory.settled()


class DryRunParts(NamedTuple):
    """Outcome of a dry run."""

    backbone: Backbone
    size: AdapterSize
    training: Training
    dry_run: DryRun
    work: StepWork
    contents: Contents


def parts(
    config: RunConfig,
    task: ModelHead,
    backbone: Backbone,
    fit: Training,
    dry: DryRun,
    work: StepWork,
    training: MakeTraining,
    timed: RunConfig | None = None,
) -> DryRunParts:
    """All that is known after a dry run.

    Args:
        timed: The run of one of the members, where there are several.
    """
    held = contents_of(fit, optimizer=dry.at_peak.get(OPTIMIZER, 0))
    below = config.freeze.never(len(fit.freezer.blocks))
    return DryRunParts(
        backbone=backbone,
        size=model_sizes.predict(config.model, config.adapter, task=task, below=below),
        training=fit,
        dry_run=dry,
        work=replace(
            work,
            weight_bytes=_read_bytes(backbone, held),
            measure=measure(timed or config, backbone, fit, dry, training),
        ),
        contents=held,
    )


def one_after_another(config: RunConfig, reason: str) -> ConfigError:
    """The refusal of members that no bank holds, and how one of them is planned."""
    if config.crossvalidates:
        alone = f"recipe=classify and data.held_out={1 / config.folds.k:.2g}, and leave folds and duplicates out"
    else:
        alone = f"recipe={config.task.name} and the values of a member, and leave {config.recipe} out"
    return ConfigError(
        f"recipe={config.recipe}: its members train one after another ({reason}). Plan one of them: in a copy of the "
        f"recipe, write {alone}."
    )


def _read_bytes(backbone: Backbone, held: Contents) -> int:
    """Bytes of weights that every micro-batch reads: all but an embedding that is no output head."""
    if anatomy.reads_pictures(backbone.model):
        return held.weight_bytes
    (embedding,) = backbone.model.get_input_embeddings().parameters(recurse=False)
    head = backbone.model.get_output_embeddings()
    is_head = head is not None and any(each is embedding for each in head.parameters())
    return held.weight_bytes - (0 if is_head else embedding.nbytes)


def attached(backbone: Backbone, config: RunConfig, train: Examples, new_token_ids: Sequence[int] = ()) -> Freezer:
    """The backbone with the adapter of the run, fresh."""
    sample = partial(first_rows, train, seed=config.seed)
    config = config.model_copy(update={"adapter": config.adapter.planned})
    return freezing.attach(backbone.model, config, seed=config.seed, new_token_ids=new_token_ids, sample=sample)


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
