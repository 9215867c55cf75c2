"""Settings of a run whose blocks cannot be dealt to the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.config.checks import parted_model_checks
from workbench.config.sections.run_sections import RunSections


def mistakes(config: RunSections) -> Iterator[str]:
    """Contradictions to `distributed.pipeline`, one sentence for each."""
    if (size := config.distributed.pipeline) == 1:
        return
    untried = ((f"was not tried with {name}", cure) for name, cure in parted_model_checks.untried(config))
    for why, cure in (*_of_stages(config), *untried):
        yield f"distributed.pipeline={size} {why}. Write {cure}, or distributed.pipeline=1."


def _of_stages(config: RunSections) -> Iterator[tuple[str, str]]:
    """Yield a reason, and what to write instead of its cause."""
    model = config.model
    if model.weights not in ("auto", "float32", "bfloat16", "nf4", "fp4"):
        yield f"brings blocks one by one, and model.weights={model.weights} is not packed so", "model.weights=nf4"
    if model.compute == "float16":
        yield "was not tried with model.compute=float16", "model.compute=bfloat16"
    if model.dropout:
        yield "has no device that draws for all blocks, as model.dropout does", "model.dropout=false"
    if config.evaluate.answers:
        yield "writes no answers: each token would go through all devices", "evaluate.answers=0"
