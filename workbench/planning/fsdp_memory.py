"""Bytes of a model's state on each device under FSDP2: arithmetic alone.

What torch 2.13 holds beside the shares is counted as its source makes it (distributed/fsdp/_fully_shard): what is
outside of blocks is whole from the first forward pass to the end of the backward pass, a block while it computes, and
what was gathered last is kept until the next block has copied its own.
"""

from __future__ import annotations

from workbench.config.sections.distributed_config import DistributedConfig
from workbench.planning.zero_memory import (
    BUCKETS,
    GATHERED,
    GRADIENTS,
    MASTERS,
    OPTIMIZER,
    WEIGHTS,
    Contents,
    HeldBytes,
    Moment,
)


def states(
    contents: Contents, how: DistributedConfig, *, devices: int, moment: Moment = "backward", passes: int = 1
) -> HeldBytes:
    """Bytes of a model's state, on one of so many devices and outside of it, without activations.

    Args:
        moment: Of a step.
        passes: Micro-batches of a step on one device.
    """
    held, sharing, place = HeldBytes(), devices // how.replicas, how.offload_parameters
    if contents.apart:
        return _under_whole_adapters(contents, how, devices=devices, moment=moment, passes=passes)
    share = sum(-(-count // sharing) for count in contents.trained)
    held.put(place, WEIGHTS, sum(-(-size // sharing) for _, size in contents.frozen))
    held.put("none", WEIGHTS, contents.whole)
    held.put(place, MASTERS, 4 * share)
    held.put(place, OPTIMIZER, contents.optimizer * share)
    if passes > 1 or moment != "forward":
        held.put(place, GRADIENTS, 4 * share)
    if moment == "step":
        return held
    block, trained = (max((each[at] for each in contents.blocks), default=0) for at in (0, 1))
    inside, inside_trained = (sum(each[at] for each in contents.blocks) for at in (0, 1))
    outside = contents.weight_bytes - contents.whole - inside
    held.put("none", GATHERED, outside + block + (inside if how.zero == 2 else 0))
    if moment == "backward":  # a block computes while the next comes
        held.put("none", GATHERED, 0 if how.zero == 2 else block)
        held.put("none", GRADIENTS, contents.element * trained)
    if moment == "last gradients":
        rest = contents.trainable - inside_trained
        held.put("none", GRADIENTS, contents.element * rest)
        held.put("none", BUCKETS, 4 * rest * (1 + 1 / sharing))
    return held


def _under_whole_adapters(
    contents: Contents, how: DistributedConfig, *, devices: int, moment: Moment, passes: int
) -> HeldBytes:
    """The same where only frozen weights are cut; gradients are added up when the last pass is over."""
    held, sharing, trainable = HeldBytes(), devices // how.replicas, contents.trainable
    held.put("none", WEIGHTS, sum(-(-size // sharing) for _, size in contents.frozen) + contents.whole)
    held.put("none", WEIGHTS, contents.element * trainable if contents.mixed else 0)
    held.put("none", MASTERS, 4 * trainable)
    held.put("none", OPTIMIZER, contents.optimizer * trainable)
    if passes > 1 or moment != "forward":
        held.put("none", GRADIENTS, 4 * trainable)
    if moment == "step":
        return held
    if moment == "last gradients":
        held.put("none", BUCKETS, min(4 * trainable, max(how.bucket_bytes, 4 * max(contents.trained, default=0))))
        return held
    frozen = [size - contents.element * trained for size, trained in contents.blocks]
    outside = sum(size for _, size in contents.frozen) - sum(frozen)
    block = max(frozen, default=0)
    if how.zero == 2:
        held.put("none", GATHERED, outside + sum(frozen) + (block if moment == "forward" else 0))
    else:
        held.put("none", GATHERED, outside + block * (2 if moment == "backward" else 1))
    return held
