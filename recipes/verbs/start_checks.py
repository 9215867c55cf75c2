"""Refusals of a run that would fail in its first seconds, before a row or weight is read; used by `check` and `run`."""

from __future__ import annotations

from functools import partial

import torch
from transformers import AutoModel

from workbench.adapters import Full
from workbench.config import RunConfig
from workbench.config.sections.distill_config import TEACHER
from workbench.errors import ConfigError, WorkbenchError
from workbench.models import backbones
from workbench.runs import deadline, units
from workbench.runs.ranks import Ranks
from workbench.training.capacity import available
from workbench.training.distributed import layout_checks


def require(config: RunConfig, ranks: Ranks, *, memory: bool = True) -> None:
    """Refuse a run that would fail in its first seconds.

    Args:
        memory: Whether to ask if it fits. Of what was planned, or begun before, that is known.

    Raises:
        WorkbenchError: says what to change.
    """
    if config.model.id != TEACHER:
        backbones.require_weights(config.model)
    deadline.require_end(config.budget)
    layout_checks.require(config, ranks)
    if memory and ranks.first:
        require_memory(config, ranks)


PLAIN = 0.125
"""Share of the memory that the state of a training may take until a plan is worth its seconds."""
CERTAIN = 1.05
"""A plan that needs more than so many times the memory is believed: none was so far above what its run held."""


def require_memory(config: RunConfig, ranks: Ranks) -> None:
    """Raise ConfigError where the run would not fit on a CPU: its process would be killed, and say nothing.

    Accelerators say themselves that their memory is full, and a run there halves its micro-batches until they fit.
    """
    device = backbones.device()
    memory = available(device) // ranks.here
    if device.type != "cpu" or state_bytes(config) < PLAIN * memory:
        return
    from workbench.recipes.verbs.plans import plan_fleet  # few runs need it
    from workbench.recipes.verbs.plans.plan import plan

    try:
        decided = plan_fleet.decided(config, partial(plan, memory=memory))
        planned = plan(decided, devices=ranks.world, memory=memory)
    except WorkbenchError:
        return  # the run says what is wrong itself, or there are no plans of its recipe
    needed = planned.needed - planned.process
    if needed > CERTAIN * memory:
        parts = sorted(planned.at_peak.items(), key=lambda part: -part[1])
        largest = ", ".join(f"{name} {units.size(size)}" for name, size in parts[:3])
        raise ConfigError(
            f"The run would need {units.size(needed)} of memory, and {units.size(memory)} are free ({largest}).\n"
            "  The fastest way that fits, if there is one, is found by: workbench plan RECIPE ... "
            "model.weights=auto train.checkpointing=auto"
        )


def state_bytes(config: RunConfig) -> int:
    """Bytes of weights, and of all that is kept of those that train, about: from config.json alone."""
    try:
        model = config.model
        if model.id == TEACHER:
            from workbench.distillation import teacher_sources  # few runs need it

            model = teacher_sources.find(config.distill.teacher, model).model
        hub = backbones.hub_config(model)
        with torch.device("meta"):
            body = AutoModel.from_config(hub, trust_remote_code=model.trust_remote_code)
    except (WorkbenchError, ValueError):
        return 0  # the run says what is wrong itself
    parameters: int = sum(each.numel() for each in body.parameters())
    return parameters * (16 if isinstance(config.adapter, Full) else 2)
