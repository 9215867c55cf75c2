"""Refusals of compressed communication, before a weight is read."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from workbench.adapters.method import Method
from workbench.config import RunConfig
from workbench.runs.ranks import Ranks
from workbench.training.distributed import layout_settings

SPREAD = ("crossval", "sweep", "search", "fleet")
"""Recipes of many trainings."""
ONE_BIT = ("adamw", "sgd")
"""Optimizers of 1-bit Adam and 1-bit SGD."""
WHOLE = ("float32", "bfloat16", "float16", "auto")
"""Weights that are no codes already."""


def refusals(config: RunConfig, ranks: Ranks) -> Iterator[str]:
    """A sentence for everything that compression does not go with."""
    section = config.distributed.compression
    yield from _of_deepspeed(config)
    if not section.is_on:
        return
    if config.recipe in SPREAD:
        yield (
            f"distributed.compression is of one training that devices share, and recipe {config.recipe} has many. "
            "Leave it out."
        )
    if ranks.alone:
        yield (
            "distributed.compression is of what travels between devices, and there is one. Write --devices 2 or more, "
            "or leave it out."
        )
    if config.train.steps is not None and config.train.steps <= section.warm_up:
        yield (
            f"distributed.compression.warm_up={section.warm_up} is all of train.steps={config.train.steps}: nothing "
            f"would be compressed. Write distributed.compression.warm_up={config.train.steps // 5}."
        )
    if section.weights != "none" and config.model.weights not in WHOLE:
        yield (
            f"distributed.compression.weights={section.weights} makes codes of values, and "
            f"model.weights={config.model.weights} travels as codes already. Leave it out."
        )
    if section.gradients != "none":
        yield from _gradients(config)
    if section.gradients == "onebit":
        yield from _one_bit(config)


def _of_deepspeed(config: RunConfig) -> Iterator[str]:
    """ZeRO++ in a person's own DeepSpeed JSON, where it would fail in its first step."""
    zero = layout_settings.read(config.distributed).get("zero_optimization", {})
    for key in ("zero_quantized_weights", "zero_quantized_gradients"):
        if zero.get(key) and not torch.cuda.is_available():
            own = key.removeprefix("zero_quantized_")
            yield (
                f"distributed.deepspeed: {key} needs DeepSpeed's kernels, built for accelerators alone. Write "
                f"'distributed={{engine: fsdp2, zero: 3, compression: {{{own}: int8}}}}', or leave {key} out."
            )


def _gradients(config: RunConfig) -> Iterator[str]:
    """Refusals where a step adds up gradients twice, or the next one those of other parameters."""
    kind = f"distributed.compression.gradients={config.distributed.compression.gradients}"
    if config.optimizer.sam or config.optimizer.name == "sophia":
        what = "sam" if config.optimizer.sam else "name=sophia"
        yield (
            f"optimizer.{what} adds up gradients more than once a step, and {kind} keeps what one sum leaves out. "
            f"{'Leave it out' if config.optimizer.sam else 'Write optimizer.name=adamw'}."
        )
    if config.freeze.policy != "none" and not config.freeze.fixed:
        yield (
            f"freeze.policy={config.freeze.policy} ends the gradients of layers, and {kind} has parts of them waiting. "
            "Write freeze.policy=static."
        )
    if config.grow.is_on:
        yield f"grow adds parameters halfway, and {kind} keeps parts of the gradients of each. Leave one of them out."


def _one_bit(config: RunConfig) -> Iterator[str]:
    """Refusals where gradients are read, and one bit or a momentum stands in their place."""
    kind, optimizer = "distributed.compression.gradients=onebit", config.optimizer
    if optimizer.name not in ONE_BIT:
        yield f"{kind} goes with optimizer.name={'|'.join(ONE_BIT)}, not {optimizer.name}. Write one, or int8."
        return
    if optimizer.name != "adamw":
        return
    if config.distributed.compression.warm_up == 0:
        yield f"{kind} with adamw learns second moments in its warm-up. Write distributed.compression.warm_up=100."
    for name in ("l1", "l2", "l2_start", "gradient_share"):
        if getattr(optimizer, name):
            yield f"optimizer.{name} changes gradients, and {kind} has momenta in their place. Leave it out."
    if type(config.adapter).train_hook is not Method.train_hook or config.adapter.looks:
        yield (
            f"adapter.method={config.adapter.method} looks at gradients, and {kind} has momenta in their place. "
            "Write distributed.compression.gradients=int8."
        )
