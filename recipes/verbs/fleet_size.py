"""How many members of a fleet train at once: as many as the memory of the device holds, by a plan."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from workbench.config import RunConfig
from workbench.config.expansions.member_runs import Trial
from workbench.models import backbones
from workbench.recipes.over.fleet_training import adapters
from workbench.recipes.verbs.plans.memory_check import PLAIN
from workbench.runs import units
from workbench.runs.ranks import ALONE, Ranks
from workbench.training.callbacks import Callback
from workbench.training.capacity import available

BYTES = 16
"""Bytes of memory for each trained parameter: value, gradient and the optimizer's two moments, in float32."""


def at_once(config: RunConfig, trials: Sequence[Trial[RunConfig]], callback: Callback, ranks: Ranks = ALONE) -> int:
    """Members that train at the same time, of those that are left; planned where it is not plain that all fit.

    Args:
        ranks: The processes that train them together; the first one decides.
    """
    if config.fleet.at_once != "auto":
        return config.fleet.at_once
    return ranks.agreed(_that_fit(config, trials, callback, ranks) if ranks.first else 0)


def _that_fit(config: RunConfig, trials: Sequence[Trial[RunConfig]], callback: Callback, ranks: Ranks) -> int:
    room = available(backbones.device()) // (ranks.here if backbones.device().type == "cpu" else 1)
    sizes = adapters(config, trials)
    if (4 * sizes[0].total + BYTES * sum(size.trainable for size in sizes)) <= PLAIN * room:
        return len(trials)
    from workbench.recipes.verbs.plans import plan, plan_fleet  # few runs need it

    members = {trial.name: config.fleet.members[trial.name] for trial in trials}
    left = config.model_copy(update={"fleet": config.fleet.model_copy(update={"members": members})})
    planning = partial(plan.plan, devices=ranks.world, memory=None if ranks.alone else room)
    many = plan_fleet.decided(left, planning).fleet.at_once
    assert many != "auto", "it is decided"
    callback.say(f"{many} of {len(trials)} members at a time: as many as fit into {units.size(room)}, by a plan.")
    return many
