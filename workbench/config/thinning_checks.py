"""Settings of a run under which steps cannot leave out blocks."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.config.run_sections import RunSections


def mistakes(config: RunSections) -> Iterator[str]:
    """Contradictions to `layer_drop`, one sentence for each."""
    if not config.layer_drop.is_on:
        return
    for why, cure in _why_not(config):
        yield f"layer_drop {why}. {cure}, or leave layer_drop out."


def _why_not(config: RunSections) -> Iterator[tuple[str, str]]:
    if config.freeze.cache in ("memory", "disk"):
        yield (
            f"changes from step to step what frozen blocks give, and freeze.cache={config.freeze.cache} keeps it",
            "Write freeze.cache=off",
        )
    if config.freeze.observes == "gradients":
        yield (
            f"gives blocks no gradient in some steps, and freeze.policy={config.freeze.policy} goes by gradients",
            "Write freeze.policy=static",
        )
    if config.train.compile:
        yield "takes blocks out of what train.compile has compiled", "Write train.compile=false"
    if config.regularise.stochastic_depth:
        yield (
            "leaves out whole blocks, and regularise.stochastic_depth rows of them: both scale what the rest adds",
            "Leave regularise.stochastic_depth out",
        )


def with_a_teacher(config: RunSections) -> Iterator[tuple[str, str]]:
    """Yield a reason, by its key, where a teacher would lose blocks too."""
    if config.layer_drop.is_on:
        yield "layer_drop", "a teacher may share the student's blocks, and would lose them too. Leave it out."
