"""Memory and time of a run on each device, memory outside of them, and whether both suffice.

And how many members of a bank fit, and what a scaling law would advise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.config.sections.basic_sections import Checkpointing
from workbench.config.sections.distributed_config import DistributedConfig
from workbench.models.model_sizes import AdapterSize
from workbench.planning import sharded_memory
from workbench.planning.cards import DeviceCard
from workbench.planning.counters import ACTIVATIONS
from workbench.planning.dry_run import GRADIENTS, MASTERS, OPTIMIZER, WEIGHTS, DryRun
from workbench.planning.sharded_memory import Contents, HeldBytes, Moment
from workbench.planning.step_time import StepWork, Timed
from workbench.runs import units
from workbench.training import checkpoint_parts

WORKSPACES = 2 * 2**25
"""Bytes of an accelerator that cuBLAS works in: 32 MiB (Hopper's) for each of the threads of both passes."""
LAW_TOKENS = 20.0  # Tokens for each parameter (Hoffmann et al. 2022, arXiv:2203.15556, table 3).
LAW_OPERATIONS = 6.0
"""Floating-point operations for each parameter and token (Kaplan et al. 2020, arXiv:2001.08361, section 2.1)."""
_ALWAYS = (WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS)  # kinds of memory that the JSON names even where they are 0
MOST = 16
"""Members of a dry run at most: it takes time for each, and between two that are known bytes grow by the member."""


@dataclass(frozen=True)
class MembersThatFit:
    """Members of a bank that a memory holds."""

    count: int  # as many as fit; 0: not even one
    each: float  # bytes that one more takes, between the two dry runs with most
    known: Mapping[int, int]  # bytes of the dry runs, by their number of members
    memory: int
    seconds: Mapping[int, float] = field(default_factory=dict)  # seconds of a step, by the number of members

    @property
    def facts(self) -> dict[str, Any]:
        """Everything, for a program."""
        return {
            "fit": self.count,
            "bytes_each": round(self.each),
            "bytes_by_dry_run": dict(self.known),
            "seconds_per_step": dict(self.seconds),
        }

    @property
    def sentence(self) -> str:
        """The result as a sentence."""
        dry_runs = ", ".join(f"{units.size(size)} with {many}" for many, size in sorted(self.known.items()))
        steps = ", ".join(f"{seconds:.3g} s with {many}" for many, seconds in sorted(self.seconds.items()))
        return (
            f"{self.count:,} adapters like these fit at a time into {units.size(self.memory)}, by "
            f"{units.size(self.each)} each (dry runs: {dry_runs}){steps and f'; a step takes {steps}'}."
        )


def that_fit(needed: Callable[[int], int], *, few: int, memory: int) -> MembersThatFit:
    """The most members whose bank takes no more than `memory` bytes.

    Bytes of members that are alike grow about evenly: with one and with `few` it is found how much. So many are the
    answer as a dry run says fit where one more does not; beyond MOST members no dry run is made.

    Args:
        few: More than one.
        needed: Bytes of a training of so many members, by a dry run.
    """
    known = {many: needed(many) for many in (few, 1)}
    while True:
        fitting = max((many for many, size in known.items() if size <= memory), default=0)
        above = min((many for many, size in known.items() if size > memory), default=None)
        # Members that take the whole memory, counted from the dry run that is nearest.
        nearest = min(known, key=lambda many: abs(known[many] - memory))
        guess = max(nearest + math.floor((memory - known[nearest]) / _each(known)), fitting + 1)
        if above is None and MOST in known:
            return MembersThatFit(guess - 1 if guess == MOST + 1 else guess, _each(known), known, memory)
        if above == fitting + 1:
            return MembersThatFit(fitting, _each(known), known, memory)
        tried = min(guess, MOST if above is None else above - 1)
        known[tried] = needed(tried)


def _each(known: Mapping[int, int]) -> float:
    less, more = sorted(known)[-2:]
    return max(1.0, (known[more] - known[less]) / (more - less))


@dataclass(frozen=True)
class Candidate:
    """One way to carry out a run, and what it would take."""

    way: str  # how this plan differs from the configuration, in words
    tokens: int  # in one forward pass on one device
    needed: int  # bytes of a device
    fits: bool
    seconds: float  # seconds of a step, without the time in which devices wait for each other
    verdict: str = ""  # taken, fits, what it lacks, or why the run would refuse it


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
    card: DeviceCard | None = None
    """The accelerator by name, where it is not here."""
    host_memory: int | None = None
    """Bytes of the host that there are for all devices; None: not known, or those of `memory`."""
    end: int = 0
    """Bytes of the host that the end of the run works in, a part of `process`."""
    saves_aside: bool = False
    """Whether checkpoints are written in the background, from a copy on the host."""
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
        return sharded_memory.states(self.contents, how, devices=self.devices, moment=moment, passes=passes)

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes alive on a device at the peak of training, by what they are for."""
        if not self.distributed.sharded:
            held = self.held("last gradients").device
            peak_bytes = self.dry_run.at_peak | self._kept
            travels = held.get(sharded_memory.BUCKETS, 0)  # when activations are gone
            if peak_bytes[ACTIVATIONS] >= travels - peak_bytes.get(sharded_memory.BUCKETS, 0):
                return peak_bytes
            return {**peak_bytes, ACTIVATIONS: 0, GRADIENTS: held[GRADIENTS], sharded_memory.BUCKETS: travels}
        return max((held.device for held in self.timeline.values()), key=lambda sizes: sum(sizes.values()))

    @property
    def _kept(self) -> dict[str, int]:
        """What compressed gradients keep from step to step, where each device holds all."""
        names, held = (sharded_memory.BUCKETS, sharded_memory.WAITING), self.held("forward").device
        return {name: held[name] for name in names if name in held}

    @property
    def evaluation(self) -> int:
        """The most that is alive on a device while the held-out loss is computed."""
        if not self.distributed.sharded:
            return self.dry_run.evaluation + sum(self._kept.values())
        standing = sum(self.dry_run.at_peak.get(name, 0) for name in (WEIGHTS, MASTERS, OPTIMIZER))
        return self.dry_run.evaluation - standing + sum(self.held("forward").device.values())

    @property
    def peak(self) -> int:
        """The most bytes that are alive on a device at once."""
        return max(sum(self.at_peak.values()), self.evaluation)

    @property
    def host(self) -> int:
        """Bytes of the host's memory that one device's share takes."""
        return self.offloaded + max(sum(self.held(moment).host.values()) for moment in sharded_memory.MOMENTS)

    @property
    def host_needed(self) -> int:
        """Bytes of the host's memory that all devices take: what waits there, and what is saved meanwhile.

        A checkpoint is copied there file by file, with its bytes as they are written, or whole where it is written in
        the background; at the end the first process has all that trained.
        """
        if self.device == "cpu":
            return 0
        checkpoint = round(self.contents.trainable * (4 + self.contents.optimizer))
        copied = checkpoint if self.saves_aside else min(2 * checkpoint, 2 * checkpoint_parts.VOLUME * self.devices)
        return self.host * self.devices + max(copied, self.contents.trainable * self.contents.element)

    @property
    def disk(self) -> int:
        """Bytes of files that one device's share takes."""
        return max(sum(self.held(moment).disk.values()) for moment in sharded_memory.MOMENTS)

    @property
    def needed(self) -> int:
        """Bytes of a device that the run takes at its peak; of a CPU, whose memory is the host's, with what waits."""
        return self.peak + self.process + (self.host if self.device == "cpu" else 0)

    @property
    def host_missing(self) -> int:
        """Bytes that the host lacks; 0 where its memory suffices or is not known."""
        return 0 if self.host_memory is None else max(0, self.host_needed - self.host_memory)

    @property
    def missing(self) -> int:
        """Bytes that a device and the host lack."""
        return max(0, self.needed - self.memory) + self.host_missing

    @property
    def lack(self) -> str:
        """What a device or the host lacks, in words."""
        more = self.needed - self.memory
        return (
            f"lacks {units.size(more)} a device" if more > 0 else f"lacks {units.size(self.host_missing)} on the host"
        )

    @property
    def fits(self) -> bool:
        """Whether there is enough memory, of each device and of the host."""
        return self.missing == 0

    @property
    def timeline(self) -> dict[Moment, HeldBytes]:
        """Bytes by purpose in each part of a step, activations at their most."""
        held_by_moment = {moment: self.held(moment) for moment in sharded_memory.MOMENTS}
        most = self.dry_run.at_peak.get(ACTIVATIONS, 0)
        # The loss computes the gradient of a head in the forward pass, unless DeepSpeed has cut its weights.
        how = self.distributed
        cut = how.zero == 3 and how.engine == "deepspeed"
        held_by_moment["forward"].device[ACTIVATIONS] = most - (4 * self.contents.head if cut else 0)
        left = sharded_memory.left_at_first_bucket(self.contents, how)
        # FSDP2 fetches the next block while one is recomputed.
        recomputed = self.dry_run.at_recomputing if how.engine == "fsdp2" else 0
        held_by_moment["backward"].device[ACTIVATIONS] = max(round(self.dry_run.at_gradients * left), recomputed)
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
        """Seconds before the first step, in which a reference reads rows or a control trains."""
        before = 0.0 if self.timed is None else self.timed.once
        return before + self.work.control * self.steps * (self.seconds or 0.0)

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
            "card": None if self.card is None else self.card.name,
            "host_bytes": self.host * self.devices,
            "host_needed_bytes": self.host_needed,
            "host_memory_bytes": self.host_memory,
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
            "zero": {"stage": self.distributed.zero, "layout": self.distributed.words},
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
        left = f"{spare:,} bytes are left" if spare >= 0 else f"{-spare:,} bytes are missing"
        return [f"The peak is in {where}; {left}.", *self.notes]


def compute_optimal(operations: float) -> tuple[float, float]:
    """Parameters N and tokens D = 20 N with 6 N D operations."""
    parameters = math.sqrt(operations / (LAW_OPERATIONS * LAW_TOKENS))
    return parameters, LAW_TOKENS * parameters


def scaling_advice(*, operations: float, parameters: int, tokens: float) -> str:
    """A sentence on a run that trains all weights, which says what the law is about."""
    fewer, more = compute_optimal(operations)
    return (
        f"Scaling law of pretraining, which fine-tuning does not follow (Hoffmann et al. 2022): {operations:.1e} "
        f"operations train a model from scratch best that has {units.count(fewer)} parameters, on "
        f"{units.count(more)} tokens; this run has {units.count(parameters)}, and {units.count(tokens)} tokens."
    )
