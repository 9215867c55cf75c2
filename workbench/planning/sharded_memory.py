"""Bytes of a model's state on each device, sharded or not, and how long devices wait for each other: arithmetic alone.

The shards of ZeRO are those of Rajbhandari et al. (2020). What DeepSpeed 0.19 holds beside them is counted as its
source makes it (runtime/zero/stage_1_and_2.py, stage3.py): padding, a second copy of float32 weights, buckets, gathered
weights. What torch 2.13 holds beside the shards of FSDP2 is counted likewise (distributed/fsdp/_fully_shard): what is
outside of blocks is whole from the first forward pass to the end of the backward pass, a block while it computes, and
what was gathered last is kept until the next block has copied its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

import torch
from torch import Tensor

from workbench.config.sections.distributed_config import DistributedConfig, Place
from workbench.models import weight_formats
from workbench.planning.dry_trainings import Model
from workbench.training.distributed import tensor_parallel
from workbench.training.distributed.sharding import blocks_apart, is_here
from workbench.training.distributed.zero_offload import KEPT_ELEMENTS

WEIGHTS, MASTERS, GRADIENTS, OPTIMIZER = "weights", "masters", "gradients", "optimizer"
BUCKETS = "buckets"  # gradients on their way to other devices
WAITING = "waiting gradients"  # what compressed gradients leave out
GATHERED = "gathered weights"  # shards of other devices that a layer needs at the moment

Moment = Literal["forward", "backward", "last gradients", "step"]
MOMENTS: tuple[Moment, ...] = ("forward", "backward", "last gradients", "step")
"""Moments of a step's last micro-batch: in `backward` its first gradients travel while most activations are held."""

LIVE = 10**8  # with zero=3, elements that may be whole at once (stage3_max_live_parameters, stage3_max_reuse_distance)
SWAPPED_AT_ONCE = 4
"""Tensors of the optimizer that are in the host's memory at once, of those that wait on disk (buffer_count)."""

REDUCED_AT_ONCE = 500_000_000
"""Elements that travel at once in zero=1 with half-precision weights (MEMORY_OPT_ALLREDUCE_SIZE)."""


@dataclass(frozen=True)
class Contents:
    """Tensors that a training keeps."""

    trained: tuple[int, ...]
    """Elements of each parameter that trains."""
    element: int
    """Bytes of one of them where the model computes."""
    head: int = 0
    """Elements of an output head that trains."""
    frozen: tuple[tuple[int, int], ...] = ()
    """Elements and bytes of each parameter that never trains."""
    whole: int = 0
    """Bytes that every device holds whatever the stage: buffers, constants of quantised weights."""
    optimizer: float = 8.0
    """Bytes of the optimizer's state for each element that trains."""
    blocks: tuple[tuple[int, int], ...] = ()
    """Bytes of the weights of each block, and elements that train; of blocks that share none with others."""
    apart: bool = False
    """Whether every device holds all that trains, as the adapters of a bank, whatever it holds of the rest."""
    gradient: int = 4
    """Bytes of an element's gradient, as micro-batches add up to it."""
    added_up: tuple[int, int] | None = None
    """Elements of each token that devices which cut blocks (`tensor`) add up in a forward and in a backward pass; None:
    not known."""

    @property
    def trainable(self) -> int:
        """Elements that train."""
        return sum(self.trained)

    @property
    def mixed(self) -> bool:
        """Whether what trains is kept in float32 beside what computes."""
        return self.element < 4

    @property
    def weight_bytes(self) -> int:
        """Bytes of the whole model as it computes."""
        return self.trainable * self.element + sum(size for _, size in self.frozen) + self.whole


@dataclass(frozen=True)
class HeldBytes:
    """Bytes by what they are for."""

    device: dict[str, int] = field(default_factory=dict)
    host: dict[str, int] = field(default_factory=dict)  # bytes of one device's share
    disk: dict[str, int] = field(default_factory=dict)  # bytes of one device's share

    def put(self, place: Place, name: str, size: float) -> None:
        """Count `size` more bytes at a place; `none` is the device."""
        where = {"none": self.device, "cpu": self.host, "nvme": self.disk}[place]
        if size:
            where[name] = where.get(name, 0) + round(size)


def states(
    contents: Contents, how: DistributedConfig, *, devices: int, moment: Moment = "backward", passes: int = 1
) -> HeldBytes:
    """Bytes of a model's state on one of `devices`, and outside of them, without activations. `moment`: of a step.
    `passes`: Micro-batches of a step on one device."""
    if how.engine == "fsdp2":
        under = _under_whole_adapters if contents.apart else _fully_sharded
        return under(contents, how, devices=devices, moment=moment, passes=passes)
    if not how.sharded:
        return _everything(contents, how, devices=devices, moment=moment)
    if how.zero == 3:
        return _cut(contents, how, devices=devices, moment=moment)
    return _flat(contents, how, devices=devices, moment=moment, passes=passes)


def left_at_first_bucket(contents: Contents, how: DistributedConfig) -> float:
    """Share of the backward pass that is left when the first bucket of gradients is full."""
    bucket = _bucket(contents, how)
    return 1 - bucket / contents.trainable if how.zero == 2 and bucket < contents.trainable else 1.0


def shares(contents: Contents, *, devices: int, stage: int) -> int:
    """Trainable elements whose masters and optimizer state one device keeps.

    Stages 1 and 2 lay them end to end and cut in parts of an even length; stage 3 cuts each parameter.
    """
    if stage == 0:
        return contents.trainable
    if stage == 3:
        return sum(-(-count // devices) for count in contents.trained)
    return 2 * -(-contents.trainable // (2 * devices))


def _everything(contents: Contents, how: DistributedConfig, *, devices: int, moment: Moment) -> HeldBytes:
    """Each device holds all."""
    held, count = HeldBytes(), contents.trainable
    held.put("none", WEIGHTS, contents.weight_bytes)
    held.put("none", MASTERS, 4 * count if contents.mixed else 0)
    held.put("none", OPTIMIZER, contents.optimizer * count)
    if moment != "forward":
        held.put("none", GRADIENTS, contents.gradient * count)
    kind, together = how.compression.gradients, how.tensor * how.pipeline
    if kind != "none" and devices > 1:
        held.put("none", BUCKETS, 4 * count)  # DDP keeps its own
        held.put("none", WAITING, 4 * count if kind == "powersgd" else 0)
        if moment == "last gradients":
            # DDP's copy; then one of what PowerSGD began with and what it leaves out anew, or halves that travel.
            held.put("none", BUCKETS, (4 + (8 if kind == "powersgd" else 2)) * count)
    elif moment == "last gradients" and devices // together > 1:
        held.put("none", BUCKETS, min(contents.gradient * count, how.bucket_bytes))
    return held


def _flat(contents: Contents, how: DistributedConfig, *, devices: int, moment: Moment, passes: int) -> HeldBytes:
    """Stages 1 and 2: all weights, those that train in one flat tensor, of a shard of which the rest is kept."""
    held, share, place = HeldBytes(), shares(contents, devices=devices, stage=1), how.offload_optimizer
    held.put("none", WEIGHTS, contents.weight_bytes + contents.element * (share * devices - contents.trainable))
    held.put(place, MASTERS, 4 * share)  # of float32 weights, too
    held.put(place, OPTIMIZER, contents.optimizer * share)
    if place != "none":
        largest = contents.element * max(contents.trained, default=0)
        own = contents.gradient * share if passes > 1 and not contents.mixed else 0
        held.put(place, GRADIENTS, 4 * share + largest + own)
        held.put(place, WEIGHTS, contents.element * share)  # on their way back
        held.put("none", BUCKETS, largest)
    whole, own, earlier = contents.gradient * share * devices, contents.gradient * share, passes > 1
    bucket, stay = _bucket(contents, how), place == "none"
    if how.zero == 1 and contents.mixed:
        # Another of DeepSpeed's optimizers, BF16_Optimizer: float32 gradients stay, those in half precision come.
        half = contents.element * share * devices
        held.put("none", GRADIENTS, whole + (half if moment != "forward" or earlier else 0))
        held.put("none", BUCKETS, 4 * min(contents.trainable, REDUCED_AT_ONCE) if moment == "step" else 0)
        return held
    if how.zero == 1:
        # Stage 1 shards gradients only when all are there.
        if earlier or moment != "forward":
            held.put("none", BUCKETS, contents.element * bucket)
        if earlier or moment in ("last gradients", "step"):
            held.put("none", GRADIENTS, whole)
    else:
        # Stage 2 sends gradients on as they come, a bucket after the other.
        several = bucket < contents.trainable
        if moment in ("backward", "last gradients"):
            held.put("none", BUCKETS, contents.element * bucket * (1 + how.overlap))
            # What travels is a copy, in float32; in the backward pass the share that it goes to comes after it.
            if moment == "last gradients" or (several and contents.mixed):
                held.put("none", BUCKETS, bucket * (4 + contents.element if contents.mixed else 4))
            held.put("none", GRADIENTS, own if stay and several and not contents.mixed else 0)
        if moment != "step":
            held.put("none", GRADIENTS, own if stay and (earlier or contents.mixed) else 0)
    if moment == "step" and stay:
        held.put("none", GRADIENTS, own)  # one tensor, for the optimizer
        held.put("none", BUCKETS, contents.element * share)  # weights on their way to the others
    return held


def _cut(contents: Contents, how: DistributedConfig, *, devices: int, moment: Moment) -> HeldBytes:
    """Stage 3: a shard of everything, and whole what a layer needs at the moment."""
    held, share, place = HeldBytes(), shares(contents, devices=devices, stage=3), how.offload_optimizer
    # Elements of every parameter, and bytes of one.
    weights = [(count, float(contents.element)) for count in contents.trained]
    weights += [(count, size / count) for count, size in contents.frozen if count]
    persistent = sum(count * each for count, each in weights if count <= KEPT_ELEMENTS)
    held.put(how.offload_parameters, WEIGHTS, sum(-(-count // devices) * each for count, each in weights))
    held.put("none", WEIGHTS, persistent + contents.whole)
    held.put(place, MASTERS, 4 * share)
    held.put(place, OPTIMIZER, contents.optimizer * share)
    held.put("none" if place == "none" else "cpu", GRADIENTS, contents.gradient * share)
    if place != "none":
        held.put(place, GRADIENTS, 4 * share)
    if place == "nvme":
        held.put("cpu", OPTIMIZER, 4 * share * SWAPPED_AT_ONCE)
    held.put("none", BUCKETS, 4 * _bucket(contents, how))
    if moment == "step":
        held.put("none", GRADIENTS, 4 * share if place == "none" else 0)
    else:
        rest = sum(count * each for count, each in weights) - persistent
        largest = max((count * each for count, each in weights), default=0)  # whole while it computes
        held.put("none", GATHERED, min(rest, max(contents.element * LIVE, largest)))
        if moment == "backward":  # fetched weights are laid out anew; before the loss takes its own, all are
            held.put("none", GATHERED, min(rest, contents.element * (how.bucket_bytes // 4)))
    return held


def _bucket(contents: Contents, how: DistributedConfig) -> int:
    """Elements of a bucket of gradients."""
    return max(1, min(how.bucket_bytes // 4, contents.trainable))


def _fully_sharded(
    contents: Contents, how: DistributedConfig, *, devices: int, moment: Moment, passes: int
) -> HeldBytes:
    """FSDP2: a shard of everything, and whole blocks while they compute."""
    held, sharing, place = HeldBytes(), devices // how.replicas, how.offload_parameters
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
    """FSDP2 where only frozen weights are sharded; gradients are added up when the last pass is over."""
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


@dataclass(frozen=True)
class Rates:
    """Bytes a second of a usual machine of its kind."""

    link: float  # bytes between devices
    host: float  # bytes between a device and the host's memory
    update: float  # bytes of the host's memory, where it takes the optimizer's step
    disk: float


ACCELERATOR = Rates(link=5e10, host=1.2e10, update=2e10, disk=2e9)
CPU = Rates(link=2e9, host=1e10, update=1e10, disk=1e9)


_SENT = {"none": 1.0, "bfloat16": 0.5, "float16": 0.5, "powersgd": 0.0, "int4": 0.125}
"""Bytes of gradients sent for each byte in float32, after the warm-up; powersgd sends next to nothing."""


def waiting_seconds(
    contents: Contents,
    how: DistributedConfig,
    rates: Rates,
    *,
    devices: int,
    passes: int,
    tokens: float = 0.0,
    again: bool = False,
) -> float:
    """Seconds that a step of `passes` micro-batches waits, if nothing is sent while devices compute.

    Each of `replicas` copies of the weights is shared among its own devices; copies add their shares of gradients.
    Of `tensor` devices that compute the same rows each adds its part of the gradients to those of other groups, and
    they add up what each computed of every token, in a ring.

    Args:
        tokens: Of a step, that one device computes.
        again: Whether blocks are computed a second time for the backward pass.
    """
    count = contents.trainable
    gradients, trained = contents.gradient * count, contents.element * count
    coded = gradients * _SENT[how.compression.gradients]
    weights = contents.weight_bytes / (contents.element if how.compression.weights == "int8" else 1)
    sharing = devices // (how.replicas * how.tensor * how.pipeline)
    others, share = (sharing - 1) / sharing, 1 / sharing
    if how.zero in ("auto", 0, 1):
        travels = 2.0 * coded
    elif how.engine == "fsdp2":  # gathered for both passes at once, or for each
        travels = passes * (coded + (1.0 if how.zero == 2 else 2.0) * weights)
    elif how.zero == 2:
        travels = passes * coded + trained
    else:
        travels = passes * (coded + 2.0 * weights)
    if how.tensor > 1 and contents.added_up is not None:
        forward, backward = contents.added_up
        elements = tokens * (forward * (2 if again else 1) + backward)
        travels_within = 2.0 * (how.tensor - 1) / how.tensor * contents.element * elements
    else:
        travels_within = 0.0
    between = 2.0 * (how.replicas - 1) / how.replicas * passes * gradients * share
    wait_seconds = (others * travels + between + travels_within) / rates.link
    state = (8 + contents.optimizer) * count * share  # master, gradient and the optimizer's own
    if how.offload_optimizer != "none":
        wait_seconds += (passes * gradients + trained) * share / rates.host + 2 * state / rates.update
    if how.offload_optimizer == "nvme":
        wait_seconds += 2 * state / rates.disk
    if how.offload_parameters != "none":
        rate = rates.host if how.offload_parameters == "cpu" else rates.disk
        wait_seconds += passes * 2 * contents.weight_bytes * share / rate
    return wait_seconds


def contents_of(fit: Model, *, optimizer: int) -> Contents:
    """The tensors of `fit`, whose optimizer keeps `optimizer` bytes of state."""
    computing = [each for each in fit.masters.computing().values() if each.requires_grad and each.numel()]
    trained = tuple(each.numel() for each in computing)
    element = max((each.element_size() for each in computing), default=4)
    frozen = {id(each): each for each in fit.model.parameters() if not each.requires_grad and is_here(each)}
    known = {id(each) for each in chain(frozen.values(), computing)}
    rest: dict[int, Tensor] = {id(each): each for each in chain(weight_formats.held(fit.model), fit.model.buffers())}
    rest = {key: each for key, each in rest.items() if is_here(each)}
    head = fit.freezer.backbone.get_output_embeddings()
    text = fit.freezer.backbone.can_generate() and not fit.freezer.backbone.config.is_encoder_decoder
    return Contents(
        added_up=tensor_parallel.added_up(fit.model) if text else None,
        trained=trained,
        head=sum(each.numel() for each in head.parameters() if each.requires_grad) if head is not None else 0,
        element=element,
        frozen=tuple(
            # Packed weights count in the precision that computes there.
            (each.nbytes // element if each.dtype == torch.uint8 else each.numel(), each.nbytes)
            for each in frozen.values()
        ),
        whole=sum(each.nbytes for key, each in rest.items() if key not in known),
        optimizer=optimizer / max(sum(trained), 1),
        blocks=tuple(
            (sum(each.nbytes for each in weights), sum(each.numel() for each in weights if each.requires_grad))
            for weights in (list(block.parameters()) for block in blocks_apart(fit.model))
        ),
    )
