"""Settings of a run that do not go with MLPs in tiles, or with inputs of blocks on the host."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.config.sections.run_sections import RunSections, TrainingSections


def mistakes(config: RunSections) -> Iterator[str]:
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
