"""Requests to evaluate a run while it trains, after its next step: a file in its directory.

A file reaches every run: one that a page started, one in a terminal, one of several processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.errors import ConfigError

FILE = "evaluate.now"
"""Stands in the run directory from the request until the step has ended."""


def ask(path: Path, config: Mapping[str, Any]) -> None:
    """Ask the run at `path` to evaluate.

    Args:
        config: Values of its config.yaml.

    Raises:
        ConfigError: It trains several adapters.
    """
    if reason := refusal(config):
        raise ConfigError(reason)
    (path / FILE).touch()


def refusal(config: Mapping[str, Any]) -> str | None:
    """Why a run of this configuration takes no requests; None where it does."""
    from workbench.config.task_facts import over_of  # with every section, which a list of runs need not wait for

    recipe, distill, over = config.get("recipe"), config.get("distill"), over_of(config)
    if (over is None or not over.adapters) and not (isinstance(distill, Mapping) and distill.get("peers")):
        return None
    return f"{recipe} trains several adapters, which are evaluated as evaluate.every says. Ask a run of one adapter."


def is_open(path: Path) -> bool:
    """Whether the run at `path` has a request that is not fulfilled yet."""
    return (path / FILE).exists()


def withdrawn(path: Path) -> bool:
    """Remove a request; returns whether there was one."""
    try:
        (path / FILE).unlink()
    except OSError:  # none, or one that this process may not remove: the run would evaluate after every step
        return False
    return True
