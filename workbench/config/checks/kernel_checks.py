"""Settings of a run that do not go with Liger's kernels of elementwise operations."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.config.sections.run_sections import RunSections, TrainingSections


def mistakes(config: RunSections) -> Iterator[str]:
    """Contradictions to `train.kernels=liger`, one sentence for each."""
    if config.train.kernels != "liger":
        return
    for why, cure in unable(config):
        yield f"train.kernels=liger {why}. Write {cure}, or train.kernels=auto."
    wanted = config.train.checkpointing
    if wanted not in (True, False, "auto"):
        yield (
            f"train.kernels=liger overwrites what blocks keep, and train.checkpointing={wanted} computes that again, "
            "operation by operation. Write train.checkpointing=true, or train.kernels=auto."
        )


def unable(config: TrainingSections) -> Iterator[tuple[str, str]]:
    """Reasons why kernels are not called in a training, and what to write instead."""
    how = config.distributed
    if config.train.compile:
        yield "brings kernels, and train.compile writes its own", "train.compile=false"
    if how.zero == 3 or how.engine == "fsdp2" or how.deepspeed is not None:
        yield "was not tried with weights that devices share (distributed)", "distributed={zero: 2}"
    if how.tensor * how.pipeline * how.sequence > 1:
        yield (
            "was not tried with blocks or rows that are cut (distributed.tensor, pipeline, sequence)",
            "distributed={zero: 2}",
        )
