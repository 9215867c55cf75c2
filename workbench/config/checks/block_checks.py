"""What does not go with blocks that are stacked, left out or disturbed while they train."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.adapters import Full
from workbench.adapters.prompts.virtual_tokens import VirtualTokens
from workbench.config import task_facts
from workbench.config.sections.run_sections import RunSections

OPTIMIZERS = ("adamw", "adamw8bit", "paged_adamw", "paged_adamw8bit", "adafactor", "sgd", "muon")
"""Optimizers that begin anew where their state is dropped."""


def of_stacking(config: RunSections) -> Iterator[str]:
    """Contradictions to `grow`, one sentence for each."""
    if not config.grow.is_on:
        if config.grow.differs("factor"):
            yield "grow.factor says how a backbone grows, and grow.at is empty. Write grow.at=[0.5], or leave grow out."
        return
    for why, cure in (*_of_blocks(config), *_of_values(config), *_of_ends(config)):
        yield f"grow {why}. {cure}, or leave grow out."


def stacking_with_a_teacher(config: RunSections) -> Iterator[tuple[str, str]]:
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


def of_thinning(config: RunSections) -> Iterator[str]:
    """Contradictions to `layer_drop` and `token_drop`, one sentence for each."""
    if config.layer_drop.is_on and config.token_drop.is_on:
        yield "layer_drop and token_drop both thin out the same blocks. Leave one of them out."
    for why, cure in (*_of_steps_thinned(config), *_of_layer_drop(config)) if config.layer_drop.is_on else ():
        yield f"layer_drop {why}. {cure}, or leave layer_drop out."
    for why, cure in (*_of_steps_thinned(config), *_of_token_drop(config)) if config.token_drop.is_on else ():
        yield f"token_drop {why}. {cure}, or leave token_drop out."


def thinning_with_a_teacher(config: RunSections) -> Iterator[tuple[str, str]]:
    """Yield a reason, by its key, where a teacher would lose blocks or tokens too."""
    for key, is_on in {"layer_drop": config.layer_drop.is_on, "token_drop": config.token_drop.is_on}.items():
        if is_on:
            yield key, "a teacher may share the student's blocks, and would lose as much. Leave it out."


def _of_steps_thinned(config: RunSections) -> Iterator[tuple[str, str]]:
    if config.freeze.cache in ("memory", "disk"):
        yield (
            f"changes from step to step what frozen blocks give, and freeze.cache={config.freeze.cache} keeps it",
            "Write freeze.cache=off",
        )
    if config.task.likelihoods:
        why = f"changes log-probabilities by chance, and recipe={config.recipe} {config.task.likelihoods}"
        yield why, "Write recipe=sft"
    if config.train.compile:
        yield "changes how blocks are called, and train.compile has compiled their calls", "Write train.compile=false"


def _of_layer_drop(config: RunSections) -> Iterator[tuple[str, str]]:
    if config.freeze.observes == "gradients":
        yield (
            f"gives blocks no gradient in some steps, and freeze.policy={config.freeze.policy} goes by gradients",
            "Write freeze.policy=static",
        )
    if config.regularise.stochastic_depth:
        yield (
            "leaves out whole blocks, and regularise.stochastic_depth rows of them: both scale what the rest adds",
            "Leave regularise.stochastic_depth out",
        )


def _of_token_drop(config: RunSections) -> Iterator[tuple[str, str]]:
    if config.model.attention not in ("auto", "sdpa", "eager"):
        yield (
            f"hands on masks of the tokens that compute, and model.attention={config.model.attention} counts tokens",
            "Write model.attention=sdpa",
        )
    if isinstance(config.adapter, VirtualTokens):
        yield (
            f"draws among a row's own tokens, and adapter.method={config.adapter.method} puts others before them",
            "Write adapter.method=lora",
        )


def of_regularise(config: RunSections) -> Iterator[str]:
    """Contradictions to section `regularise`, one sentence for each."""
    section = config.regularise
    yield from section.misfits(words=config.media is None, cache=config.freeze.cache)
    if config.task.labelled:
        for key in ("label_smoothing", "z_loss"):
            if getattr(section, key):
                tokens = task_facts.names(lambda task: task.tokens)
                yield f"regularise.{key} is for recipe={tokens}, not for {config.recipe}. See classes.smoothing."
    for key in ("sam", "noise_scale") if section.mixout else ():
        if getattr(config.optimizer, key):
            yield (
                f"optimizer.{key} compares gradients where the values are, and regularise.mixout puts some where they "
                "began. Leave one of them out."
            )
    if section.r_drop:
        by_row = config.adapter.noise > 0 and config.adapter.method != "boft"  # whose rows share one rotation
        if not (by_row or config.model.dropout or section.noisy):
            own = " (of lora, say)" if config.adapter.noise else "=0.1"
            yield (
                "regularise.r_drop compares two passes over a row with different dropout, and nothing is dropped, so "
                f"that they are the same. Write model.dropout=true, or adapter.dropout{own}."
            )


def regularise_with_a_teacher(config: RunSections) -> Iterator[tuple[str, str]]:
    """Yield each setting that a teacher's loss has no place for, and what to write instead."""
    for key in ("label_smoothing", "z_loss", "r_drop"):
        if getattr(config.regularise, key):
            yield (
                f"regularise.{key}",
                "the loss of a distillation compares with a teacher. Leave it out; distill.alpha weighs both.",
            )
