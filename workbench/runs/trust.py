"""Python code that a run directory names. Reading a run executes none of it unless the user asks for it.

A run directory may come from anybody, and its config.yaml may name files with Python code.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.errors import ConfigError
from workbench.runs import files

_EMBEDDERS = ("duplicates", "correction", "rerank")
"""Sections that name another run, with a key `trust`."""
_KEYS = (
    ("plugins",),
    ("tta", "function"),
    ("model", "trust_remote_code"),
    *((section, "trust") for section in _EMBEDDERS),
)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trust:
    """Whether the code that a run directory names is executed, and how a user asks for that."""

    given: bool = False
    cure: str = "--trust"


def code(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a configuration that execute Python code, as `section.key`, with their values."""
    code_values = {}
    for path in _KEYS:
        value: Any = values
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value:
            code_values[".".join(path)] = value
    return code_values


def without(values: Mapping[str, Any], folder: Path, trust: Trust) -> dict[str, Any]:
    """The configuration in the run directory `folder` without the code that it names.

    Raises:
        ConfigError: The run's predictions need the code.
    """
    named, safe_values = code(values), dict(values)
    if "plugins" in named:
        safe_values["plugins"] = []
    if "model.trust_remote_code" in named:
        safe_values["model"] = {**values["model"], "trust_remote_code": False}
    for section in _EMBEDDERS:
        if f"{section}.trust" in named:
            safe_values[section] = {**values[section], "trust": False}
    if "tta.function" in named:
        if files.read_json(folder / "decision.json").get("tta") is not None:
            raise refused(folder, f"its predictions need tta.function={named['tta.function']}", trust)
        safe_values["tta"] = {}  # its views did not help, so that predictions do not use them
    return safe_values


def say(values: Mapping[str, Any], folder: Path, trust: Trust) -> None:
    """Warn of the code of a run directory that is not executed."""
    words = {
        key: f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value).lower()
        for key, value in code(values).items()
    }
    if words:
        shown = ", ".join(f"{key}={word}" for key, word in words.items())
        _log.warning(
            f"{folder}: left out {shown}, Python code that its config.yaml names. If you trust who made this run, "
            f"write {trust.cure} to execute it."
        )


def refused(folder: Path, why: str, trust: Trust) -> ConfigError:
    """The error of a run that cannot be read without its code."""
    return ConfigError(
        f"{folder}: {why}, Python code that only its config.yaml names. If you trust who made this run, write "
        f"{trust.cure} to execute it."
    )
