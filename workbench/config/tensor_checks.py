"""Settings of a run under which devices cannot compute the same rows together, each a part of every block."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.adapters import Full
from workbench.config.run_sections import RunSections

METHODS = ("lora", "rslora", "lora+", "full")
"""Methods whose values are cut with the layers that they belong to."""
OPTIMIZERS = ("adamw", "sgd", "lion")
"""Optimizers that step each value by itself."""


def mistakes(config: RunSections) -> Iterator[str]:
    """Contradictions to `distributed.tensor`, one sentence for each."""
    if (size := config.distributed.tensor) == 1:
        return
    for why, cure in (*_of_models(config), *_of_steps(config), *_of_draws(config), *_of_rows(config)):
        yield f"distributed.tensor={size} {why}. Write {cure}, or distributed.tensor=1."


def _of_models(config: RunSections) -> Iterator[tuple[str, str]]:
    """Yield a reason, and what to write instead of its cause."""
    adapter, model = config.adapter, config.model
    if config.recipe != "sft":
        yield f"is for recipe=sft, and recipe={config.recipe} was not tried with it", "recipe=sft"
    if adapter.method not in METHODS:
        yield (
            f"goes with {', '.join(METHODS)}, and nothing says how values of adapter.method={adapter.method} are cut",
            "adapter.method=lora",
        )
    if getattr(adapter, "experts", False):
        yield "cuts layers, and adapter.experts changes experts", "adapter.experts=false"
    if isinstance(adapter, Full) and adapter.sparsity is not None:
        yield "cuts weights, and adapter.sparsity chooses among those of whole layers", "adapter.sparsity=null"
    if model.weights in ("int8", "nf4", "fp4"):
        yield f"cuts rows and columns, which model.weights={model.weights} packs", "model.weights=bfloat16"
    if model.attention not in ("auto", "sdpa"):
        yield f"was not tried with model.attention={model.attention}", "model.attention=sdpa"
    if model.new_tokens:
        yield "was not tried with model.new_tokens", "model.new_tokens=[]"


def _of_steps(config: RunSections) -> Iterator[tuple[str, str]]:
    """Where a step needs more than each value's own gradient."""
    optimizer = config.optimizer
    if optimizer.name not in OPTIMIZERS:
        yield (
            f"goes with {', '.join(OPTIMIZERS)}, and optimizer.name={optimizer.name} needs more of a matrix",
            "optimizer.name=adamw",
        )
    for name in ("sam", "noise_scale", "lookahead", "gradient_share", "l1", "l2", "l2_start"):
        if getattr(optimizer, name):
            cure = "0" if name in ("l1", "l2", "l2_start") else "null"
            yield f"was not tried with optimizer.{name}", f"optimizer.{name}={cure}"
    if config.average.method != "none":
        yield f"was not tried with average.method={config.average.method}", "average.method=none"
    if config.freeze.policy != "none":
        yield f"was not tried with freeze.policy={config.freeze.policy}", "freeze.policy=none"
    if config.train.compile:
        yield "adds up over devices inside of blocks, which train.compile does not know", "train.compile=false"
    for name in ("layer_drop", "token_drop", "grow"):
        if getattr(config, name).is_on:
            yield f"was not tried with {name}", f"{name}={{}}"


def _of_draws(config: RunSections) -> Iterator[tuple[str, str]]:
    """Where devices would have to draw the same numbers."""
    draws = {
        "adapter.dropout": (config.adapter.noise, "adapter.dropout=0"),
        "model.dropout": (config.model.dropout, "model.dropout=false"),
        "regularise": (
            config.regularise.noisy or config.regularise.r_drop or config.regularise.mixout,
            "regularise={}",
        ),
    }
    for name, (is_on, cure) in draws.items():
        if is_on:
            yield f"has no device with all heads and features, for which {name} draws", cure


def _of_rows(config: RunSections) -> Iterator[tuple[str, str]]:
    """Where rows are chosen by what devices find out about them."""
    data = config.data
    if data.sampling.by != "all":
        yield f"was not tried with data.sampling.by={data.sampling.by}", "data.sampling={}"
    if data.mix.by == "learned":
        yield "was not tried with data.mix.by=learned", "data.mix.by=size"
    if data.curriculum.measured or data.curriculum.by == "self_paced":
        yield f"was not tried with data.curriculum.by={data.curriculum.by}", "data.curriculum.by=length"
    if data.select.by_backbone:
        yield f"was not tried with data.select.by={data.select.by}", data.select.random_instead
