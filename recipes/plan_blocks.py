"""Small real models of the kind that a run trains, whose blocks `plan` times."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from workbench.adapters import Full
from workbench.config import RunConfig
from workbench.config.tasks import Task
from workbench.data.batching import Examples, first_rows
from workbench.data.labelled.labelled_data import ClassSplits
from workbench.models import backbones, classifier, output_heads
from workbench.models.backbones import Backbone
from workbench.planning import block_time, step_time
from workbench.planning.block_time import Measured, Small
from workbench.planning.dry_trainings import SingleTraining, Training
from workbench.planning.fake_loading import settle
from workbench.recipes import sft
from workbench.runs import run_directory
from workbench.runs.run_directory import Run
from workbench.training.bank_trainer import BankTrainer
from workbench.training.callbacks import Silent
from workbench.training.freezing import freezer as freezing
from workbench.training.freezing.freezer import Freezer
from workbench.training.trainer import Trainer

WHOLE = 60_000_000
"""Parameters of a backbone up to which all of its blocks are timed."""


def classes(config: RunConfig, tokenizer: PreTrainedTokenizerBase, data: ClassSplits) -> block_time.Build:
    """The training of a classifier over a small backbone."""
    from workbench.recipes import classify

    def fitting(own: RunConfig, run: Run, small: Backbone, freezer: Freezer) -> Trainer:
        model = classifier.classification_model(freezer.model, small.model, tokenizer, data.labels)
        return classify.fitting(own, run, data, small, freezer, model, Silent())

    task = classifier.task(data.labels, seed=config.seed)
    return partial(built, config, backbones.hub_config(config.model), task, data.train, fitting, (), 0)


def member(config: RunConfig, task: Task, run: Run) -> block_time.Build:
    """The training of one member."""
    from workbench.recipes import classify

    if task.head == "classes":
        tokenizer, data, _ = classify.prepare(config)
        return classes(config, tokenizer, data)
    tokenizer, _, texts = sft.prepare(config, run)

    def fitting(own: RunConfig, run: Run, small: Backbone, freezer: Freezer) -> Trainer:
        return sft.fitting(own, run, texts, small, freezer, output_heads.known(small.model), Silent())

    return partial(built, config, backbones.hub_config(config.model), task, texts.train, fitting, (), len(tokenizer))


def measure(
    config: RunConfig, backbone: Backbone, fit: Trainer | BankTrainer, build: block_time.Build
) -> step_time.Measure:
    """Times small models of the kind of `backbone`, when it is asked to."""
    hub = backbones.hub_config(config.model)
    trainable = sum(each.numel() for each in fit.masters)
    narrower = block_time.narrowing(hub)
    depth = block_time.depth(hub)
    step = 1 if narrower > 1 else 2
    if sum(each.numel() for each in backbone.model.parameters()) <= WHOLE:
        step = depth

    def timed(clock: Callable[[], float], seconds: float) -> Measured:
        return block_time.measure(
            build,
            depth=depth,
            narrower=narrower,
            trainable=trainable,
            step=step,
            dtype=backbone.compute,
            packed=backbone.weights in backbones.QUANTISED,
            clock=clock,
            seconds=seconds,
        )

    return timed


@contextmanager
def built(
    config: RunConfig,
    hub: PretrainedConfig,
    task: Task,
    train: Examples,
    fitting: Callable[[RunConfig, Run, Backbone, Freezer], Trainer],
    new_token_ids: Sequence[int],
    vocabulary: int,
    small: Small,
) -> Iterator[Training]:
    """The run's own training with real tensors, over a backbone that is cut down."""
    with tempfile.TemporaryDirectory() as folder:
        model = block_time.smaller(config.model, hub, small, Path(folder) / "model")
        own = config.model_copy(update={"model": model, "trackers": ()})
        backbone = blueprint(own, task, vocabulary=vocabulary)
        settle(backbone.model, backbone)
        sample = partial(first_rows, train, seed=own.seed)
        freezer = freezing.attach(backbone.model, own, seed=own.seed, new_token_ids=new_token_ids, sample=sample)
        run = run_directory.start(Path(folder) / "run", own, resume=False)
        try:
            yield SingleTraining(fitting(own, run, backbone, freezer))
        finally:
            run.close()


def blueprint(config: RunConfig, task: Task, *, vocabulary: int = 0) -> Backbone:
    """The backbone without its weights, as the run would store them."""
    trainable = isinstance(config.adapter, Full)
    return backbones.blueprint(config.model, vocabulary=vocabulary, task=task, trainable=trainable)
