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
    if config.evaluate.answers:
        yield "writes no answers: each token would go through all devices", "evaluate.answers=0"
