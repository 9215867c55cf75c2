"""Settings of a run under which devices cannot compute the same rows together, each a part of the tokens."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.config.checks import parted_model_checks
from workbench.config.sections.run_sections import RunSections


def mistakes(config: RunSections) -> Iterator[str]:
    """Contradictions to `distributed.sequence`, one sentence for each."""
    if (size := config.distributed.sequence) == 1:
        return
    for why, cure in (*_of_models(config), *_of_noise(config), *_of_rows(config)):
        yield f"distributed.sequence={size} {why}. Write {cure}, or distributed.sequence=1."


def _of_models(config: RunSections) -> Iterator[tuple[str, str]]:
    """Yield a reason, and what to write instead of its cause."""
    method = config.adapter.method
    if not config.task.parted or config.over is not None:
        yield f"is for long rows of recipe=sft; recipe={config.recipe} reads a row's first or last token", "recipe=sft"
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


def _of_rows(config: RunSections) -> Iterator[tuple[str, str]]:
    """Where rows are drawn by what a device knows of whole rows."""
    for name, cure in parted_model_checks.row_choices(config):
        yield f"has no device that knows a row's loss, which {name} asks for", cure
    if config.evaluate.dynamics is True:
        yield "has no device that knows a row's loss, and evaluate.dynamics records it", "evaluate.dynamics=false"
