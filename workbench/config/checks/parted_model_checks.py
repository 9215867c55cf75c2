"""Settings of a run that were not tried where each device holds a part of the model, of its blocks or of each block."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.config.sections.run_sections import RunSections

METHODS = ("lora", "rslora", "lora+", "full")
"""Methods whose values go where the layers go that they belong to, and that start without reading weights."""
OPTIMIZERS = ("adamw", "sgd", "lion")
"""Optimizers that step each value by itself."""


def untried(config: RunSections) -> Iterator[tuple[str, str]]:
    """Yield settings, and what to write instead of each."""
    adapter = config.adapter
    if not config.task.parted or config.over is not None:
        yield f"recipe={config.recipe}", "recipe=sft"
    if config.distributed.pipeline > 1 and adapter.method not in METHODS:
        yield f"adapter.method={adapter.method} ({', '.join(METHODS)} were)", "adapter.method=lora"
    if getattr(adapter, "experts", False):
        yield "adapter.experts", "adapter.experts=false"
    if getattr(adapter, "sparsity", None) is not None:
        yield "adapter.sparsity", "adapter.sparsity=null"
    if config.model.new_tokens:
        yield "model.new_tokens", "model.new_tokens=[]"
    if config.model.sparsity is not None:
        yield "model.sparsity", "model.sparsity=null"
    yield from _of_steps(config)
    yield from row_choices(config)


def _of_steps(config: RunSections) -> Iterator[tuple[str, str]]:
    """Where a step needs more than each value's own gradient, or blocks that are always computed."""
    optimizer, regularise = config.optimizer, config.regularise
    if optimizer.name not in OPTIMIZERS:
        yield f"optimizer.name={optimizer.name} ({', '.join(OPTIMIZERS)} were)", "optimizer.name=adamw"
    for name in ("sam", "noise_scale", "lookahead", "gradient_share", "l1", "l2", "l2_start"):
        if getattr(optimizer, name):
            cure = "0" if name in ("l1", "l2", "l2_start") else "null"
            yield f"optimizer.{name}", f"optimizer.{name}={cure}"
    if config.average.method != "none":
        yield f"average.method={config.average.method}", "average.method=none"
    if config.freeze.policy != "none":
        yield f"freeze.policy={config.freeze.policy}", "freeze.policy=none"
    if config.train.compile:
        yield "train.compile", "train.compile=false"
    for name in ("layer_drop", "token_drop", "grow"):
        if getattr(config, name).is_on:
            yield name, f"{name}={{}}"
    if regularise.noisy or regularise.r_drop or regularise.mixout:
        yield "regularise", "regularise={}"


def row_choices(config: RunSections) -> Iterator[tuple[str, str]]:
    """Yield settings that choose rows by what devices find out about them, and what to write instead of each."""
    data = config.data
    if data.sampling.by != "all":
        yield f"data.sampling.by={data.sampling.by}", "data.sampling={}"
    if data.mix.by == "learned":
        yield "data.mix.by=learned", "data.mix.by=size"
    if data.curriculum.measured or data.curriculum.by == "self_paced":
        yield f"data.curriculum.by={data.curriculum.by}", "data.curriculum.by=length"
    if data.select.by_backbone:
        yield f"data.select.by={data.select.by}", data.select.random_instead
