"""How long devices wait for each other, for the host and for a disk in a step: bytes over rates."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.config.sections.distributed_config import DistributedConfig
from workbench.planning.zero_memory import Contents


@dataclass(frozen=True)
class Rates:
    """Bytes and operations a second of a usual machine of its kind; what is measured here replaces `flops`."""

    flops: float
    link: float
    """Bytes between devices."""
    host: float
    """Bytes between a device and the host's memory."""
    update: float
    """Bytes of the host's memory, where it takes the optimizer's step."""
    disk: float


ACCELERATOR = Rates(flops=1e14, link=5e10, host=1.2e10, update=2e10, disk=2e9)
CPU = Rates(flops=1e11, link=2e9, host=1e10, update=1e10, disk=1e9)


_SENT = {"none": 1.0, "bfloat16": 0.5, "float16": 0.5, "powersgd": 0.0, "int4": 0.125}
"""Bytes of gradients that travel for each of float32, after a warm-up; powersgd's thin matrices are little."""


def seconds(contents: Contents, how: DistributedConfig, rates: Rates, *, devices: int, passes: int) -> float:
    """Seconds that a step waits with so many micro-batches on each device, if nothing travels while devices compute.

    Each of `replicas` copies of the weights is shared among its own devices; copies add their shares of gradients.
    Of `tensor` devices that compute the same rows each adds its part of the gradients to those of other groups.
    """
    count = contents.trainable
    gradients, trained = contents.gradient * count, contents.element * count
    coded = gradients * _SENT[how.compression.gradients]
    weights = contents.weight_bytes / (contents.element if how.compression.weights == "int8" else 1)
    sharing = devices // (how.replicas * how.tensor * how.pipeline)
    others, share = (sharing - 1) / sharing, 1 / sharing
    if how.zero in (0, 1):
        travels = 2.0 * coded
    elif how.engine == "fsdp2":  # gathered for both passes at once, or for each
        travels = passes * (coded + (1.0 if how.zero == 2 else 2.0) * weights)
    elif how.zero == 2:
        travels = passes * coded + trained
    else:
        travels = passes * (coded + 2.0 * weights)
    between = 2.0 * (how.replicas - 1) / how.replicas * passes * gradients * share
    wait_seconds = (others * travels + between) / rates.link
    state = (8 + contents.optimizer) * count * share  # master, gradient and the optimizer's own
    if how.offload_optimizer != "none":
        wait_seconds += (passes * gradients + trained) * share / rates.host + 2 * state / rates.update
    if how.offload_optimizer == "nvme":
        wait_seconds += 2 * state / rates.disk
    if how.offload_parameters != "none":
        rate = rates.host if how.offload_parameters == "cpu" else rates.disk
        wait_seconds += passes * 2 * contents.weight_bytes * share / rate
    return wait_seconds
