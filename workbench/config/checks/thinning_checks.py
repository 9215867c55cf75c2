"""Settings of a run under which steps cannot leave out blocks, or blocks tokens."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.adapters.prompts.virtual_tokens import VirtualTokens
from workbench.config.sections.run_sections import RunSections


def mistakes(config: RunSections) -> Iterator[str]:
    """Contradictions to `layer_drop` and `token_drop`, one sentence for each."""
    if config.layer_drop.is_on and config.token_drop.is_on:
        yield "layer_drop and token_drop both thin out the same blocks. Leave one of them out."
    for why, cure in (*_of_both(config), *_of_layers(config)) if config.layer_drop.is_on else ():
        yield f"layer_drop {why}. {cure}, or leave layer_drop out."
    for why, cure in (*_of_both(config), *_of_tokens(config)) if config.token_drop.is_on else ():
        yield f"token_drop {why}. {cure}, or leave token_drop out."


def with_a_teacher(config: RunSections) -> Iterator[tuple[str, str]]:
    """Yield a reason, by its key, where a teacher would lose blocks or tokens too."""
    for key, is_on in {"layer_drop": config.layer_drop.is_on, "token_drop": config.token_drop.is_on}.items():
        if is_on:
            yield key, "a teacher may share the student's blocks, and would lose as much. Leave it out."


def _of_both(config: RunSections) -> Iterator[tuple[str, str]]:
    """Yield a reason, and a cure."""
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


def _of_layers(config: RunSections) -> Iterator[tuple[str, str]]:
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


def _of_tokens(config: RunSections) -> Iterator[tuple[str, str]]:
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
