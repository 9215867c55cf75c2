"""Refusals of a run that would fail in its first seconds, before a row or weight is read; used by `check` and `run`."""

from __future__ import annotations

from workbench.config import RunConfig
from workbench.recipes.verbs.plans import memory_check
from workbench.runs import deadline
from workbench.runs.ranks import Ranks
from workbench.training.distributed import layout_checks


def require(config: RunConfig, ranks: Ranks, *, memory: bool = True) -> None:
    """Refuse a run that would fail in its first seconds.

    Args:
        memory: Whether to ask if it fits. Of what was planned, or begun before, that is known.

    Raises:
        WorkbenchError: says what to change.
    """
    deadline.require_end(config.budget)
    layout_checks.require(config, ranks)
    if memory and ranks.first:
        memory_check.require_memory(config, ranks)
