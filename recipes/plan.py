"""`workbench plan`: what a run takes, found out by carrying out its step on tensors without numbers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from workbench import backbones, classifier, evaluation, heads, runs, sizes, tasks
from workbench.adapters import Full
from workbench.backbones import Backbone
from workbench.config import RunConfig
from workbench.console import Terminal
from workbench.data.batching import Examples, first_rows
from workbench.engine import Fit
from workbench.errors import ConfigError
from workbench.evaluation import predicting, scores
from workbench.freezing import freezer as freezing
from workbench.freezing.freezer import Freezer
from workbench.planning.imagined import imagine, imagining
from workbench.planning.packed import pack
from workbench.planning.plan import Plan
from workbench.planning.rehearsal import Rehearsed, largest_rows, rehearse
from workbench.recipes import classify, sft
from workbench.runs import Run
from workbench.sections.budgeting import BudgetConfig
from workbench.tasks import Task


class Parts(NamedTuple):
    """What was rehearsed."""

    backbone: Backbone
    task: Task
    fit: Fit
    rehearsed: Rehearsed


def plan(config: RunConfig, *, memory: int | None = None) -> Plan:
    """Rehearse a run without reading a weight.

    Args:
        memory: Bytes of the device; None: what is available here.

    Raises:
        WorkbenchError: the run would be refused, or its recipe cannot be planned.
    """
    ways = {"sft": _text, "mlm": _text, "classify": _classes}
    if config.recipe not in ways:
        known = ", ".join(ways)
        raise ConfigError(f"recipe={config.recipe}: `plan` knows the recipes {known}. Plan one of its members as such.")
    process = psutil.Process().memory_info().rss if backbones.device().type == "cpu" else 0
    config = _untimed(config)
    with tempfile.TemporaryDirectory() as folder:
        run = runs.start(Path(folder) / "plan", config, resume=False)
        try:
            backbone, task, fit, rehearsed = ways[config.recipe](config, run)
        finally:
            run.close()
    below = config.freeze.never(len(fit.freezer.blocks))
    return Plan(
        device=str(backbones.device()),
        weights=backbone.weights,
        size=sizes.predict(config.model, config.adapter, task=task, below=below),
        steps=fit.member.total,
        tokens_per_device=fit.tokens,
        rehearsed=rehearsed,
        process=process,
        memory=memory or _available(backbones.device()),
        notes=tuple(_notes(config)),
    )


def _available(device: torch.device) -> int:
    """Bytes of memory that a run could have."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def _notes(config: RunConfig) -> Iterator[str]:
    if config.model.weights == "int8":
        yield "8-bit layers are taken to find outliers in every column, the most that there may be."
    if config.freeze.policy != "none" and config.freeze.cache in ("auto", "memory"):
        yield "Outputs of frozen blocks that freeze.cache keeps in memory are not counted: the run says how many."


def _text(config: RunConfig, run: Run) -> Parts:
    tokenizer, _, data = sft.prepare(config, run)
    task = tasks.of(config)
    backbone = _blueprint(config, task, vocabulary=len(tokenizer))
    new_tokens = [tokenizer.get_vocab()[token] for token in config.model.new_tokens]
    worst = data.held_out.subset(largest_rows(data.held_out, tokens=scores.TOKENS))
    with _imagined(config, task, backbone, data.train, new_tokens) as freezer:
        head = heads.known(backbone.model)
        fit = sft.fitting(config, run, data, backbone, freezer, head, Terminal(quiet=True))
        found = rehearse(fit, lambda: evaluation.likelihood(freezer.model, head, worst))
    return Parts(backbone, task, fit, found)


def _classes(config: RunConfig, run: Run) -> Parts:
    tokenizer, data, _ = classify.prepare(config)
    task = classifier.task(data.labels, seed=config.seed)
    backbone = _blueprint(config, task)
    worst = data.held_out.batch(largest_rows(data.held_out, tokens=predicting.TOKENS)).to(backbones.device())
    with _imagined(config, task, backbone, data.train) as freezer:
        model = classifier.find(freezer.model, backbone.model, tokenizer, data.labels)
        fit = classify.fitting(config, run, data, backbone, freezer, model, Terminal(quiet=True))
        found = rehearse(fit, lambda: model.outputs(worst))
    return Parts(backbone, task, fit, found)


def _blueprint(config: RunConfig, task: Task, *, vocabulary: int = 0) -> Backbone:
    trainable = isinstance(config.adapter, Full)
    return backbones.blueprint(config.model, vocabulary=vocabulary, task=task, trainable=trainable)


@contextmanager
def _imagined(
    config: RunConfig, task: Task, backbone: Backbone, train: Examples, new_token_ids: Sequence[int] = ()
) -> Iterator[Freezer]:
    """Inside the block the backbone is imagined, with the adapter of the run."""
    # Layers of bitsandbytes that hold nothing yet cannot be called.
    plain = config.model.model_copy(update={"weights": "float32", "compute": "float32"})
    layers = freezing.layers_of(backbones.skeleton(plain, task=task), config)
    sample = partial(first_rows, train, seed=config.seed)
    model = freezing.adapt(backbone.model, config, layers, seed=config.seed, new_token_ids=new_token_ids, sample=sample)
    with imagining():
        imagine(model, backbones.device())
        if backbone.weights in backbones.QUANTISED:
            pack(model, backbone.weights, backbone.compute)
        yield Freezer(model, backbone.model, layers, config.freeze, seed=config.seed)


def _untimed(config: RunConfig) -> RunConfig:
    """The same run without a wall clock, of one epoch where nothing else ends it."""
    if not config.budget.timed:
        return config
    ends = config.train.steps is not None or config.train.epochs is not None or config.budget.tokens is not None
    train = config.train if ends else config.train.model_copy(update={"epochs": 1.0})
    return config.model_copy(update={"budget": BudgetConfig(tokens=config.budget.tokens), "train": train})
