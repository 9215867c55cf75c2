"""Settings of a run that do not go with devices that compute the same rows together (pipeline, tensor, sequence)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from workbench.adapters import Full
from workbench.adapters.method import plain_lora
from workbench.config import task_facts
from workbench.config.sections.run_sections import RunSections

OPTIMIZERS = ("adamw", "sgd", "lion")
"""Optimizers that step each value by itself."""


def mistakes(config: RunSections) -> Iterator[str]:
    """Contradictions to `distributed.sequence`, `tensor` and `pipeline`, one sentence for each."""
    layout, untried = config.distributed, _untried(config)
    by_name = {
        "sequence": chain(_of_parts_of_rows(config), _of_noise(config), _of_row_losses(config)),
        "tensor": chain(_of_cut_blocks(config), untried),
        "pipeline": chain(_of_stages(config), untried),
    }
    for name, reasons in by_name.items():
        if (size := getattr(layout, name)) > 1:
            for why, cure in chain(_of_recipe(config, name), reasons):
                yield f"distributed.{name}={size} {why}. Write {cure}, or distributed.{name}=1."


def _of_recipe(config: RunSections, name: str) -> Iterator[tuple[str, str]]:
    """Yield a reason, and what to write instead of its cause, where the task's facts have one."""
    if why := getattr(config.task, name):
        able = task_facts.names(lambda task: getattr(task, name) is None)
        yield f"does not go with recipe={config.recipe}, which {why}", f"recipe={able}"


def of_recipes(config: RunSections) -> Iterator[str]:
    """Yield a sentence for each layout that a recipe over tasks would deal its members to, or teach wrongly in."""
    for name in ("sequence", "tensor", "pipeline"):
        if config.over is not None and (size := getattr(config.distributed, name)) > 1:
            yield (
                f"distributed.{name}={size} was not tried with recipe={config.recipe}. Write "
                f"recipe={config.task.name}, or distributed.{name}=1."
            )


def _of_stages(config: RunSections) -> Iterator[tuple[str, str]]:
    """Yield a reason, and what to write instead of its cause."""
    model = config.model
    if config.batch.packing is False:
        yield "computes packed rows of one length, and batch.packing=false has none", "batch.packing=auto"
    if config.batch.shared_prefix is True:
        yield "was not tried with batch.shared_prefix", "batch.shared_prefix=auto"
    if config.distributed.schedule == "zero_bubble" and config.train.checkpointing not in (False, "auto"):
        yield (
            "computes gradients of weights later with schedule=zero_bubble, and train.checkpointing keeps nothing for "
            "them",
            "train.checkpointing=false",
        )
    if model.attention not in ("auto", "sdpa"):
        yield f"packs rows, and model.attention={model.attention} is another kernel", "model.attention=sdpa"
    if model.weights not in ("auto", "float32", "bfloat16", "nf4", "fp4"):
        yield f"brings blocks one by one, and model.weights={model.weights} is not packed so", "model.weights=nf4"
    if model.compute == "float16":
        yield "was not tried with model.compute=float16", "model.compute=bfloat16"
    if model.dropout:
        yield "has no device that draws for all blocks, as model.dropout does", "model.dropout=false"
    if config.evaluate.answers and config.task.writes_text:
        yield "writes no answers: each token would go through all devices", "evaluate.answers=0"


def _of_cut_blocks(config: RunSections) -> Iterator[tuple[str, str]]:
    model = config.model
    if model.weights in ("int8", "nf4", "fp4", "fp8"):
        yield f"cuts rows and columns, which model.weights={model.weights} packs", "model.weights=bfloat16"
    if model.attention not in ("auto", "sdpa"):
        yield f"was not tried with model.attention={model.attention}", "model.attention=sdpa"
    for name, drops, cure in (("adapter", config.adapter.noise, "0"), ("model", model.dropout, "false")):
        if drops:
            yield f"has no device with all heads and features, for which {name}.dropout draws", f"{name}.dropout={cure}"


def _untried(config: RunSections) -> Iterator[tuple[str, str]]:
    """What was not tried where each device holds a part of the model, and what to write instead."""
    for name, cure in (*_of_models(config), *whole_steps(config), *_of_steps(config), *_row_choices(config)):
        yield f"was not tried with {name}", cure


def _of_models(config: RunSections) -> Iterator[tuple[str, str]]:
    adapter = config.adapter
    if config.distributed.pipeline > 1 and not (adapter.facts.plain_lora or isinstance(adapter, Full)):
        yield f"adapter.method={adapter.method}", f"adapter.method=full|{plain_lora()}"
    if getattr(adapter, "experts", False):
        yield "adapter.experts", "adapter.experts=false"
    if getattr(adapter, "sparsity", None) is not None:
        yield "adapter.sparsity", "adapter.sparsity=null"
    if config.model.new_tokens:
        yield "model.new_tokens", "model.new_tokens=[]"
    if config.model.sparsity is not None:
        yield "model.sparsity", "model.sparsity=null"


def whole_steps(config: RunSections) -> Iterator[tuple[str, str]]:
    """Yield settings for which a step has whole weights and gradients, and what to write instead of each."""
    optimizer = config.optimizer
    if optimizer.name not in OPTIMIZERS:
        yield f"optimizer.name={optimizer.name}", f"optimizer.name={'|'.join(OPTIMIZERS)}"
    for name in ("sam", "noise_scale", "lookahead", "gradient_share", "l1", "l2", "l2_start"):
        if getattr(optimizer, name):
            cure = "0" if name in ("l1", "l2", "l2_start") else "null"
            yield f"optimizer.{name}", f"optimizer.{name}={cure}"
    if config.average.method != "none":
        yield f"average.method={config.average.method}", "average.method=none"
    for name in ("layer_drop", "token_drop", "grow"):
        if getattr(config, name).is_on:
            yield name, f"{name}={{}}"
    if config.regularise.mixout:
        yield "regularise.mixout", "regularise.mixout=0"


def _of_steps(config: RunSections) -> Iterator[tuple[str, str]]:
    if config.freeze.policy != "none":
        yield f"freeze.policy={config.freeze.policy}", "freeze.policy=none"
    if config.train.compile:
        yield "train.compile", "train.compile=false"
    if config.regularise.noisy or config.regularise.r_drop:
        yield "regularise", "regularise={}"


def _row_choices(config: RunSections) -> Iterator[tuple[str, str]]:
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


def _of_parts_of_rows(config: RunSections) -> Iterator[tuple[str, str]]:
    method = config.adapter.method
    if config.model.attention not in ("auto", "sdpa"):
        yield f"needs sdpa, and model.attention={config.model.attention} is another kernel", "model.attention=sdpa"
    if config.adapter.facts.no_packing:
        yield (
            f"does not go with adapter.method={method}: a part of a row is not all that it reads",
            "adapter.method=lora",
        )
    if config.freeze.policy != "none":
        yield f"was not tried with freeze.policy={config.freeze.policy}", "freeze.policy=none"
    if config.optimizer.name == "sophia":
        yield "has no device that sees whole rows, for which optimizer.name=sophia draws", "optimizer.name=adamw"
    if config.train.compile:
        yield "sends heads around inside of blocks, which train.compile does not know", "train.compile=false"


def _of_noise(config: RunSections) -> Iterator[tuple[str, str]]:
    """Where tokens of whole rows draw."""
    if config.adapter.noise:
        yield "has no device that sees whole rows, for which adapter.dropout draws", "adapter.dropout=0"
    if config.adapter.facts.draws:
        method = config.adapter.method
        yield f"has no device that sees whole rows, for which adapter.method={method} draws", "adapter.method=lora"
    if config.model.dropout:
        yield "has no device that sees whole rows, for which model.dropout draws", "model.dropout=false"
    if config.regularise.noisy or config.regularise.r_drop:
        yield "has no device that sees whole rows, for which regularise draws", "regularise={}"
    if config.token_drop.is_on:
        yield "has no device that sees whole rows, of which token_drop drops tokens", "token_drop={}"


def _of_row_losses(config: RunSections) -> Iterator[tuple[str, str]]:
    for name, cure in _row_choices(config):
        yield f"has no device that knows a row's loss, which {name} asks for", cure
    if config.evaluate.dynamics is True:
        yield "has no device that knows a row's loss, and evaluate.dynamics records it", "evaluate.dynamics=false"
