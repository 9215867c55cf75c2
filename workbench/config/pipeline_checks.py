"""Settings of a run whose blocks cannot be dealt to the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.config.run_sections import RunSections

METHODS = ("lora", "rslora", "lora+", "full")
"""Methods that change blocks alone, or all, and start without reading the weights below them."""
OPTIMIZERS = ("adamw", "sgd", "lion")
"""Optimizers whose step of a value reads nothing of others."""


def mistakes(config: RunSections) -> Iterator[str]:
    """Contradictions to `distributed.pipeline`, one sentence for each."""
    if (size := config.distributed.pipeline) == 1:
        return
    for why, cure in (*_of_models(config), *_of_steps(config), *_of_rows(config)):
        yield f"distributed.pipeline={size} {why}. Write {cure}, or distributed.pipeline=1."


def _of_models(config: RunSections) -> Iterator[tuple[str, str]]:
    """Yield a reason, and what to write instead of its cause."""
    adapter, model = config.adapter, config.model
    if config.recipe != "sft":
        yield f"is for recipe=sft; a loss of recipe={config.recipe} may look at a whole model", "recipe=sft"
    if adapter.method not in METHODS:
        yield (
            f"goes with {', '.join(METHODS)}, and adapter.method={adapter.method} was not tried",
            "adapter.method=lora",
        )
    if getattr(adapter, "experts", False):
        yield "was not tried with adapter.experts", "adapter.experts=false"
    if getattr(adapter, "sparsity", None) is not None:
        yield "was not tried with adapter.sparsity, which compares all weights", "adapter.sparsity=null"
    if model.weights not in ("auto", "float32", "bfloat16", "nf4", "fp4"):
        yield f"brings blocks one by one, and model.weights={model.weights} is not packed so", "model.weights=nf4"
    if model.compute == "float16":
        yield "was not tried with model.compute=float16", "model.compute=bfloat16"
    if model.dropout:
        yield "has no device that draws for all blocks, as model.dropout does", "model.dropout=false"
    if model.new_tokens:
        yield (
            "was not tried with model.new_tokens, whose rows train in the first and the last stage",
            "model.new_tokens=[]",
        )


def _of_steps(config: RunSections) -> Iterator[tuple[str, str]]:
    """Yield a reason and a cure where something looks at all blocks, or at all gradients, in a step."""
    optimizer = config.optimizer
    if optimizer.name not in OPTIMIZERS:
        yield (
            f"goes with {', '.join(OPTIMIZERS)}, and optimizer.name={optimizer.name} was not tried",
            "optimizer.name=adamw",
        )
    for name in ("sam", "noise_scale", "lookahead", "gradient_share", "l1", "l2", "l2_start"):
        if getattr(optimizer, name):
            yield f"has no device with all gradients, which optimizer.{name} reads", "optimizer={}"
    if config.freeze.policy != "none":
        yield f"was not tried with freeze.policy={config.freeze.policy}", "freeze.policy=none"
    if config.average.method != "none":
        yield "has no device with all weights, of which average takes the mean", "average.method=none"
    for name in ("layer_drop", "token_drop", "grow"):
        if getattr(config, name).is_on:
            yield f"deals blocks once for the whole run, and {name} changes which compute what", f"{name}={{}}"
    if config.regularise.noisy or config.regularise.r_drop or config.regularise.mixout:
        yield "was not tried with noise on hidden states or weights, as regularise asks for", "regularise={}"
    if config.train.compile:
        yield "calls blocks from outside of the model, which train.compile does not know", "train.compile=false"


def _of_rows(config: RunSections) -> Iterator[tuple[str, str]]:
    """Yield a reason and a cure where something asks for outputs of the model besides the loss of a step."""
    data = config.data
    if config.evaluate.answers:
        yield "writes no answers: each token would go through all devices", "evaluate.answers=0"
    if data.sampling.by != "all":
        yield (
            f"tells one device alone of a row's loss, and data.sampling.by={data.sampling.by} reads it",
            "data.sampling={}",
        )
    if data.mix.by == "learned":
        yield "tells one device alone of a row's loss, and data.mix.by=learned reads it", "data.mix.by=size"
    if data.curriculum.measured or data.curriculum.by == "self_paced":
        why = f"tells one device alone of a row's loss, and data.curriculum.by={data.curriculum.by} reads it"
        yield why, "data.curriculum.by=length"
    if data.select.by_backbone:
        yield (
            f"was not tried with data.select.by={data.select.by}, which asks a whole model",
            data.select.random_instead,
        )
