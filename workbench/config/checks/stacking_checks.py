"""Settings of a run under which its blocks cannot be stacked, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.adapters import Full
from workbench.config.sections.run_sections import RunSections

OPTIMIZERS = ("adamw", "adamw8bit", "paged_adamw", "paged_adamw8bit", "adafactor", "sgd", "muon")
"""Optimizers that begin anew where their state is dropped."""


def mistakes(config: RunSections) -> Iterator[str]:
    """Contradictions to `grow`, one sentence for each."""
    if not config.grow.is_on:
        if config.grow.differs("factor"):
            yield "grow.factor says how a backbone grows, and grow.at is empty. Write grow.at=[0.5], or leave grow out."
        return
    for why, cure in (*_of_blocks(config), *_of_values(config), *_of_ends(config)):
        yield f"grow {why}. {cure}, or leave grow out."


def with_a_teacher(config: RunSections) -> Iterator[tuple[str, str]]:
    """Yield a reason, by its key, where a teacher needs blocks that are not there yet."""
    if config.grow.is_on and config.distill.match:
        yield "grow", "distill.match compares blocks that are not there before the student has grown. Leave one out."
    if config.grow.is_on and config.distill.on_policy.share:
        yield "grow", "distill.on_policy was not tried with a student that grows. Leave one of them out."


def _of_blocks(config: RunSections) -> Iterator[tuple[str, str]]:
    """Yield a reason, and a cure, where something else decides about blocks, or others rely on them."""
    if not isinstance(config.adapter, Full):
        yield (
            f"copies whole blocks, and adapter.method={config.adapter.method} trains other values over blocks that "
            "stay what they are",
            "Write adapter.method=full, or adapter.method=block-expansion, which adds blocks over frozen ones",
        )
    elif config.adapter.sparsity is not None:
        yield "would copy weights onto others that adapter.sparsity keeps at zero", "Leave adapter.sparsity out"
    if not config.task.grows or config.over is not None:
        why = f"changes one model during its training, which was not tried with recipe={config.recipe}"
        yield why, f"Write recipe={config.task.name if config.task.grows else 'sft'}"
    if config.freeze.policy != "none":
        why = f"and freeze.policy={config.freeze.policy} both say which blocks train"
        yield why, "Write freeze.policy=none"
    for key, is_on in {"layer_drop": config.layer_drop.is_on, "token_drop": config.token_drop.is_on}.items():
        if is_on:
            yield f"and {key} both thin out the same blocks", f"Leave {key} out"
    if config.regularise.stochastic_depth:
        yield (
            "leaves out blocks, and regularise.stochastic_depth scales what the rest adds by their number",
            "Leave regularise.stochastic_depth out",
        )
    if config.train.compile:
        yield "changes how blocks are called, and train.compile has compiled their calls", "Write train.compile=false"


def _of_values(config: RunSections) -> Iterator[tuple[str, str]]:
    """Yield a reason, and a cure, where something looks back to values from before a stacking."""
    optimizer = config.optimizer
    if optimizer.name not in OPTIMIZERS:
        yield (
            f"lets the optimizer begin anew, which optimizer.name={optimizer.name} does not by its state alone",
            "Write optimizer.name=adamw",
        )
    for key in ("lookahead", "gradient_share", "sam_reuse", "l2_start"):
        if getattr(optimizer, key):
            yield f"replaces values and gradients that optimizer.{key} looks back to", f"Leave optimizer.{key} out"
    if config.regularise.mixout:
        yield "replaces values that regularise.mixout goes back to", "Leave regularise.mixout out"
    if config.average.method != "none":
        why = f"gives blocks other values, and average.method={config.average.method} would mix both"
        yield why, "Write average.method=none"


def _of_ends(config: RunSections) -> Iterator[tuple[str, str]]:
    if config.evaluate.patience is not None:
        yield "needs the whole run, and evaluate.patience may end it before it has grown", "Leave evaluate.patience out"
