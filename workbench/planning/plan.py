"""Memory and time of a run on each device, memory outside of them, and whether both suffice."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from workbench.config.sections.basic_sections import Checkpointing
from workbench.config.sections.distributed_config import DistributedConfig
from workbench.models.adapter_sizes import AdapterSize
from workbench.planning import fsdp_memory, zero_memory
from workbench.planning.dry_run import GRADIENTS, MASTERS, OPTIMIZER, WEIGHTS, DryRun
from workbench.planning.members_that_fit import MembersThatFit
from workbench.planning.memory_ledger import ACTIVATIONS
from workbench.planning.step_time import StepWork, Timed
from workbench.planning.zero_memory import Contents, HeldBytes, Moment

WORKSPACES = 2 * 2**25
"""Bytes of an accelerator that cuBLAS works in: 32 MiB (Hopper's) for each of the threads of both passes."""


@dataclass(frozen=True)
class Candidate:
    """One way to carry out a run, and what it would take."""

    way: str
    """How this plan differs from the configuration, in words."""
    tokens: int
    """In one forward pass on one device."""
    needed: int
    """Bytes of a device."""
    fits: bool
    seconds: float
    """Seconds of a step, without the time in which devices wait for each other."""


@dataclass(frozen=True)
class Plan:
    """Memory and time of a run on each device."""

    device: str
    """Its kind."""
    weights: str
    """How the backbone's weights are stored."""
    checkpointing: Checkpointing
    """How activations are kept for the backward pass; no `auto`, which begins by keeping them all."""
    size: AdapterSize
    steps: int
    tokens_per_device: int
    """In one forward pass at most, padding included."""
    longest: int
    """Tokens that one device computes of the longest row."""
    dry_run: DryRun
    """On one device, that holds everything."""
    work: StepWork
    """Work of that device in a step."""
    contents: Contents
    process: int
    """Bytes that Python and its libraries hold beside all tensors, measured in this process; of an accelerator here,
    what libraries work in; of one elsewhere 0."""
    memory: int
    """Bytes that there are, for each device."""
    offloaded: int = 0
    """Bytes of inputs of blocks that wait in the host's memory between the passes."""
    notes: tuple[str, ...] = ()
    """Sentences on what the figures leave out."""
    devices: int = 1
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    seconds: float | None = None
    """Seconds of a step."""
    timed: Timed | None = None
    """The devices' share of these seconds, with its interval."""
    tried: tuple[Candidate, ...] = ()
    """All ways that were compared, this one included."""
    members: MembersThatFit | None = None
    """How many members like those of a bank fit."""
    recomputable: bool = True
    """Whether its adapter goes with checkpointing on this backbone."""
    by_block: bool = True
    """Whether elementwise operations, or some blocks alone, can be recomputed."""

    def held(self, moment: Moment) -> HeldBytes:
        """Bytes of the model's state at a moment of a step."""
        passes, how = self.dry_run.micro_batches, self.distributed
        states = fsdp_memory.states if how.engine == "fsdp2" else zero_memory.states
        return states(self.contents, how, devices=self.devices, moment=moment, passes=passes)

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes alive on a device at the peak of training, by what they are for."""
        if self.distributed.zero == 0:
            held = self.held("last gradients").device
            waiting = {name: size for name, size in held.items() if name == zero_memory.WAITING}
            peak_bytes = self.dry_run.at_peak | waiting  # gradients travel when activations are gone
            if peak_bytes[ACTIVATIONS] >= (travels := held.get(zero_memory.BUCKETS, 0)):
                return peak_bytes
            return {**peak_bytes, ACTIVATIONS: 0, GRADIENTS: held[GRADIENTS], zero_memory.BUCKETS: travels}
        return max((held.device for held in self.timeline.values()), key=lambda sizes: sum(sizes.values()))

    @property
    def evaluation(self) -> int:
        """The most that is alive on a device while the held-out loss is computed."""
        if self.distributed.zero == 0:
            return self.dry_run.evaluation + self.held("forward").device.get(zero_memory.WAITING, 0)
        standing = sum(self.dry_run.at_peak.get(name, 0) for name in (WEIGHTS, MASTERS, OPTIMIZER))
        return self.dry_run.evaluation - standing + sum(self.held("forward").device.values())

    @property
    def peak(self) -> int:
        """The most bytes that are alive on a device at once."""
        return max(sum(self.at_peak.values()), self.evaluation)

    @property
    def host(self) -> int:
        """Bytes of the host's memory that one device's share takes."""
        return self.offloaded + max(sum(self.held(moment).host.values()) for moment in zero_memory.MOMENTS)

    @property
    def disk(self) -> int:
        """Bytes of files that one device's share takes."""
        return max(sum(self.held(moment).disk.values()) for moment in zero_memory.MOMENTS)

    @property
    def needed(self) -> int:
        """Bytes of a device that the run takes at its peak; of a CPU, whose memory is the host's, with what waits."""
        return self.peak + self.process + (self.host if self.device == "cpu" else 0)

    @property
    def fits(self) -> bool:
        """Whether there is enough memory."""
        return self.needed <= self.memory

    @property
    def offload(self) -> str:
        """Sentence on the states that wait outside of the devices."""
        how = self.distributed
        places = {"optimizer": how.offload_optimizer, "parameters": how.offload_parameters}
        return ", ".join(f"{name} to {place}" for name, place in places.items() if place != "none") or "none"

    @property
    def timeline(self) -> dict[Moment, HeldBytes]:
        """Bytes by purpose in each part of a step, activations at their most."""
        held_by_moment = {moment: self.held(moment) for moment in zero_memory.MOMENTS}
        most = self.dry_run.at_peak.get(ACTIVATIONS, 0)
        # The loss computes the gradient of a head in the forward pass, unless DeepSpeed has cut its weights.
        how = self.distributed
        cut = how.zero == 3 and how.engine == "deepspeed"
        held_by_moment["forward"].device[ACTIVATIONS] = most - (4 * self.contents.head if cut else 0)
        left = zero_memory.left_at_first_bucket(self.contents, how)
        # FSDP2 fetches the next block while one is recomputed.
        recomputed = self.dry_run.at_recomputing if how.engine == "fsdp2" else 0
        backward = max(round(self.dry_run.at_gradients * left), recomputed)
        held_by_moment["backward"].device[ACTIVATIONS] = backward
        return held_by_moment

    @property
    def interval(self) -> tuple[float, float] | None:
        """Seconds that a step takes at least and at most, its waiting included; None where nothing was measured."""
        if self.seconds is None or self.timed is None:
            return None
        waits = self.seconds - self.timed.seconds
        return self.timed.low + waits, self.timed.high + waits

    @property
    def once(self) -> float:
        """Seconds before the first step in which a reference reads rows."""
        return 0.0 if self.timed is None else self.timed.once

    @property
    def facts(self) -> dict[str, Any]:
        """Everything, for a program."""
        dry_run = self.dry_run
        hours = None if self.seconds is None else (self.once + self.seconds * self.steps) / 3600
        return {
            "device": self.device,
            "devices": self.devices,
            "weights": self.weights,
            "checkpointing": self.checkpointing,
            "offloaded_bytes": self.offloaded,
            "parameters": {"total": self.size.total, "trainable": self.size.trainable},
            "bytes": {**dict.fromkeys(_ALWAYS, 0), **self.at_peak, "evaluation": self.evaluation, "peak": self.peak},
            "process_bytes": self.process,
            "host_bytes": self.host * self.devices,
            "disk_bytes": self.disk * self.devices,
            "memory_bytes": self.memory,
            "adapter_bytes": self.size.file_bytes,
            "flops_per_token": round(dry_run.flops_per_token),
            "steps": self.steps,
            "seconds_per_step": self.seconds,
            "seconds_per_step_interval": self.interval,
            "seconds_before": None if self.seconds is None else self.once,
            "hours": hours,
            "batch": {"tokens_per_device": self.tokens_per_device, "micro_batches": dry_run.micro_batches},
            "zero": {"stage": self.distributed.zero, "offload": self.offload},
            "timeline": {moment: vars(held) for moment, held in self.timeline.items()},
            **({} if self.members is None else {"members": self.members.facts}),
            "tried": [vars(each) for each in self.tried],
            "fits": self.fits,
            "reasons": self.reasons,
        }

    @property
    def reasons(self) -> list[str]:
        """Where the peak is, what is left, and what the figures do not hold."""
        where = "training" if self.peak > self.evaluation else "evaluation"
        spare = self.memory - self.needed
        left = f"{spare:,} bytes are left" if self.fits else f"{-spare:,} bytes are missing"
        return [f"The peak is in {where}; {left}.", *self.notes]


_ALWAYS = (WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS)
"""Kinds of memory that the JSON names even where they are 0."""
