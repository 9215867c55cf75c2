"""Memory and time of a pipeline: its fullest stage and its slowest, by dry runs of the first, the second and the last.

Stages between the second and the last have at most as many blocks as the second, and keep fewer micro-batches alive.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from dataclasses import replace
from typing import Protocol

from workbench.config import RunConfig
from workbench.config.sections.distributed_config import DistributedConfig
from workbench.models import output_heads
from workbench.planning.plan import Plan
from workbench.planning.step_time import Measure, Measured
from workbench.training.distributed import pipeline

NOTE = (
    "The time in which hidden states travel between stages (distributed.pipeline), and that of the padding which fills "
    "micro-batches up to one length, is not counted."
)
BUBBLES = {"1f1b": 1.0, "interleaved": 0.5, "zero_bubble": 0.0}
"""Turns of a micro-batch that each other stage makes a stage wait in a step, by the schedule."""


class MakePlan(Protocol):
    """Makes the plan of one of so many devices."""

    def __call__(self, config: RunConfig, *, devices: int) -> Plan:
        """The plan of a run."""


def fullest(config: RunConfig, make: MakePlan, *, devices: int) -> Plan:
    """Plan of the stage that takes most memory, with the time of the slowest.

    Args:
        make: Plans a device's work: of a whole model, or of the stage that `pipeline.PLANNED` names.
    """
    stages = config.distributed.pipeline

    def of(stage: int) -> Plan:
        pipeline.PLANNED.set(stage)
        return make(config, devices=devices)

    planned = [copy_context().run(of, stage) for stage in sorted({0, 1, stages - 1})]
    batch = config.batch.model_copy(update={"tokens_per_device": planned[0].tokens_per_device})
    alone = config.model_copy(update={"batch": batch, "distributed": DistributedConfig()})
    with output_heads.whole_last_block(True):
        whole = make(alone, devices=max(1, devices // stages))
    most = max(planned, key=lambda each: each.peak)
    slowest = max(each.dry_run.flops_per_token for each in planned)
    micro_batches, padded = whole.dry_run.micro_batches, whole.dry_run.padded_tokens
    measure = whole.work.measure
    training = max(each.contents.trainable for each in planned) / max(1, whole.contents.trainable)
    turns = (whole.work.passes + ((stages - 1) * BUBBLES[config.distributed.schedule])) / whole.work.passes
    return replace(
        most,
        dry_run=replace(most.dry_run, micro_batches=micro_batches, padded_tokens=padded, flops_per_token=slowest),
        work=replace(
            whole.work,
            padded=whole.work.padded * turns,
            tokens=whole.work.tokens * turns,
            passes=whole.work.passes * turns,
            weight_bytes=max(each.work.weight_bytes for each in planned),
            measure=None if measure is None else _shared(measure, slowest / whole.dry_run.flops_per_token, training),
        ),
        notes=(*whole.notes, NOTE),
    )


def _shared(measure: Measure, computing: float, training: float) -> Measure:
    """Times a stage as a share of what is measured of a whole model."""

    def measured(clock: Callable[[], float], seconds: float) -> Measured:
        whole = measure(clock, seconds)
        return replace(
            whole,
            token=whole.token * computing,
            error=whole.error * computing,
            update=whole.update * training,
            flops=whole.flops * computing,
        )

    return measured
