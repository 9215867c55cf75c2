"""Checks of `train.checkpointing`: what recomputing parts of blocks does not go with."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.config.sections.run_sections import RunSections, TrainingSections


def mistakes(config: RunSections) -> Iterator[str]:
    """Contradictions, one sentence for each."""
    wanted = config.train.checkpointing
    if wanted in (True, False, "auto"):
        return
    for what, cure in unable_by_block(config):
        yield f"train.checkpointing={wanted} {what}. {cure}, or train.checkpointing=true."


def unable_by_block(config: TrainingSections) -> Iterator[tuple[str, str]]:
    """Reasons why blocks cannot be recomputed in part, or only some of them, and what to write instead."""
    if config.train.compile:
        yield "is left to torch.compile, which decides itself what it computes again", "Write train.compile=false"
    if config.distributed.tensor > 1:
        yield (
            "does not know what blocks keep whose weights are cut (distributed.tensor)",
            "Leave distributed.tensor out",
        )
    if (config.distributed.zero == 3 and config.distributed.engine == "deepspeed") or config.distributed.deepspeed:
        yield (
            "reads weights that DeepSpeed has given away by then",
            "Write distributed.engine=fsdp2",
        )
