"""The layout of a run that leaves it `auto`: each device holds all where that plainly fits, else what a plan chooses.

The first process decides for all. A run says what was decided and why, notes it in its manifest, and keeps it where it
is resumed on as many devices.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from workbench.config import RunConfig
from workbench.config.sections.distributed_config import DistributedConfig
from workbench.errors import WorkbenchError
from workbench.models import backbones
from workbench.recipes.verbs import start_checks
from workbench.runs import files, run_directory, units
from workbench.runs.ranks import Ranks
from workbench.training import capacity

ROOM = 0.5
"""Share of an accelerator's memory up to which the state of a training is taken to leave room for its activations."""
NOTE, ALONE = "layout", {"devices": 1}
"""Key of the manifest, and what a run has there that says nothing."""


class Layout(NamedTuple):
    """How devices share a run, and why."""

    config: RunConfig
    why: str = "as written"
    tried: tuple[dict[str, Any], ...] = ()
    """Ways that a plan compared."""

    def told(self, devices: int) -> dict[str, Any]:
        """For the manifest."""
        return {
            "layout": self.config.distributed.words,
            "devices": devices,
            "why": self.why,
            "tried": list(self.tried),
        }

    def sentence(self, devices: int) -> str:
        """For a person."""
        return f"Layout of {devices} device{'s' * (devices > 1)}: {self.config.distributed.words} ({self.why})."


def decided(config: RunConfig, ranks: Ranks, *, begun: Path | None = None) -> Layout:
    """The layout of a run, in every process.

    Args:
        begun: The run directory, where the run is resumed.

    Raises:
        ConfigError: No layout fits.
    """
    section = config.distributed
    if section.zero != "auto" or section.deepspeed is not None:
        return Layout(config)
    device = backbones.device()
    free = capacity.available(device) // (1 if capacity.limits_steps(device) else ranks.here)
    memory = min(ranks.gathered(free))
    found = for_memory(config, memory, devices=ranks.world, begun=begun) if ranks.first else Layout(config)
    return ranks.agreed(found)


def for_memory(config: RunConfig, memory: int, *, devices: int, begun: Path | None = None) -> Layout:
    """The layout of a run that leaves it open, on devices of so many free bytes each; see `decided`."""
    there = begun is not None and (begun / "config.yaml").exists()
    if begun is not None and there and files.read_json(begun / "manifest.json").get(NOTE, ALONE)["devices"] == devices:
        return Layout(_as_begun(config, run_directory.begun(begun, config)), "as the run began")
    section, limited = config.distributed, capacity.limits_steps(backbones.device())
    if section.tensor * section.pipeline > 1:
        return _with(config, zero=0, why="as written")
    places = {section.offload_optimizer, section.offload_parameters}
    open_to_all = section.engine == "deepspeed" and places == {"none"} and section.nvme is None
    if open_to_all and devices == 1 and not limited:
        return _with(config, zero=0, why="the processor is its own host")
    state = start_checks.state_bytes(config)
    if open_to_all and state < (ROOM if limited else start_checks.PLAIN) * memory:
        why = f"about {units.size(state)} of weights and states, of {units.size(memory)} each"
        return _with(config, zero=0, why=why)
    from workbench.recipes.verbs.plans import plan  # few runs need it

    room = int((1 - capacity.SPARE) * memory) if limited else memory  # as the run leaves room itself
    host = int(psutil.virtual_memory().available) if limited else None
    try:
        choice = plan.choice(config, plan.PlanTarget(devices, room, elsewhere=limited, host=host))
    except WorkbenchError as error:
        return _with(config, zero=_least(section), why=f"no plan says more: {str(error).splitlines()[0]}")
    if choice.plan.missing > (start_checks.CERTAIN - 1) * memory:
        choice.require()
    chosen = choice.config
    if limited:  # tries how much fits itself
        undecided = {name: getattr(config.train, name) for name in ("checkpointing", "offload_activations", "mlp_tile")}
        chosen = chosen.model_copy(update={"batch": config.batch, "train": chosen.train.model_copy(update=undecided)})
    first, fitting = choice.plan.tried[0], sum(each.fits for each in choice.plan.tried)
    why = f"the fastest of {fitting} ways that fit by a plan; {first.way} {first.verdict}"
    return Layout(chosen, why, tuple(map(asdict, choice.plan.tried)))


def _with(config: RunConfig, *, zero: int, why: str) -> Layout:
    layout = config.distributed.model_copy(update={"zero": zero})
    return Layout(config.model_copy(update={"distributed": layout}), why)


def _least(section: DistributedConfig) -> int:
    """The stage that has what is written."""
    if section.engine == "fsdp2" or section.offload_parameters != "none":
        return 3
    return 2 if section.offload_optimizer != "none" else 0


def _as_begun(config: RunConfig, begun: RunConfig) -> RunConfig:
    """The configuration with the decisions that were taken when the run began."""
    train = {
        name: getattr(begun.train, name)
        for name in ("checkpointing", "offload_activations")
        if getattr(config.train, name) == "auto"
    }
    weights = begun.model.weights if config.model.weights == "auto" else config.model.weights
    return config.model_copy(
        update={
            "distributed": begun.distributed,
            "train": config.train.model_copy(update=train),
            "model": config.model.model_copy(update={"weights": weights}),
        }
    )
