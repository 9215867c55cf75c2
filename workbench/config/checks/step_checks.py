"""What does not go with how a step is computed: recomputed blocks, kernels, long rows, curvature."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.adapters import Full
from workbench.config.sections.run_sections import RunSections, TrainingSections


def of_checkpointing(config: RunSections) -> Iterator[str]:
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


def of_kernels(config: RunSections) -> Iterator[str]:
    """Contradictions to `train.kernels=liger`, one sentence for each."""
    if config.train.kernels != "liger":
        return
    for why, cure in unable_by_kernels(config):
        yield f"train.kernels=liger {why}. Write {cure}, or train.kernels=auto."
    wanted = config.train.checkpointing
    if wanted not in (True, False, "auto"):
        yield (
            f"train.kernels=liger overwrites what blocks keep, and train.checkpointing={wanted} computes that again, "
            "operation by operation. Write train.checkpointing=true, or train.kernels=auto."
        )


def unable_by_kernels(config: TrainingSections) -> Iterator[tuple[str, str]]:
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


def of_rounding(config: RunSections) -> Iterator[str]:
    """Contradictions to `train.rounded`, one sentence for each."""
    rounded = f"train.rounded={config.train.rounded}"
    if config.train.rounded is None:
        return
    if not isinstance(config.adapter, Full):
        yield (
            f"{rounded} trains the weights that are rounded, and adapter.method={config.adapter.method} others. Write "
            "adapter.method=full, or leave it out."
        )
    if config.distributed.sharded:
        yield f"{rounded} was not tried with weights that devices share. Leave distributed or it out."


def of_long_rows(config: RunSections) -> Iterator[str]:
    """Contradictions to `train.mlp_tile` and `train.offload_activations`, one sentence for each."""
    train = config.train
    if isinstance(train.mlp_tile, int):
        for why in (*untiled(config), *untiled_layout(config)):
            yield f"train.mlp_tile={train.mlp_tile} {why}, or train.mlp_tile=auto."
    if train.offload_activations is True:
        if train.checkpointing is not True:
            yield (
                "train.offload_activations=true keeps inputs of blocks that are computed again. "
                "Write train.checkpointing=true as well, or train.offload_activations=auto."
            )
        for why in _dealt(config):
            yield f"train.offload_activations=true {why}, or train.offload_activations=auto."


def untiled(config: TrainingSections) -> Iterator[str]:
    """Yield why MLPs cannot compute tiles in a training, and what to write instead of the cause."""
    if config.train.compile:
        yield "computes blocks in pieces, and train.compile compiles them whole. Write train.compile=false"
    if config.adapter.method == "alora":
        yield "shows layers a part of each row, and adapter.method=alora begins at a place in it. Write lora"


def untiled_layout(config: TrainingSections) -> Iterator[str]:
    """Yield the same for how devices share weights."""
    yield from _dealt(config)
    how = config.distributed
    if how.engine == "deepspeed" and (how.zero == 3 or how.deepspeed is not None):
        yield (
            "calls layers once for each tile, and all processes of DeepSpeed must fetch a weight equally often, "
            "however long their rows are. Write distributed.engine=fsdp2"
        )


def _dealt(config: TrainingSections) -> Iterator[str]:
    how = config.distributed
    if how.tensor * how.pipeline > 1:
        yield "was not tried with parts of blocks or stretches of them (distributed). Write distributed={zero: 2}"


def of_curvature(config: RunSections) -> Iterator[str]:
    """Contradictions between sophia and the rest of a run, one sentence for each."""
    if config.optimizer.name != "sophia":
        return
    if not config.task.tokens:
        yield (
            f"optimizer.name=sophia draws tokens from what the model predicts, and recipe={config.recipe} has other "
            "labels. Write optimizer.name=adamw."
        )
    if config.regularise.r_drop:
        yield "optimizer.name=sophia draws one token a label, which r_drop predicts twice. Leave one of them out."
