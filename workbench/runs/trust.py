"""Python code that a run directory names. Reading a run executes none of it unless the user asks for it.

A run directory may come from anybody, and its config.yaml may name files with Python code.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from workbench import schema
from workbench.config import RunConfig
from workbench.errors import ConfigError
from workbench.runs import files
from workbench.schema import Section

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trust:
    """Whether the code that a run directory names is executed, and how a user asks for that."""

    given: bool = False
    cure: str = "--trust"


def code(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a configuration that execute Python code, as `section.key`, with their values."""
    return {setting.key: setting.value for setting in schema.code(RunConfig, values)}


def without(values: Mapping[str, Any], folder: Path, trust: Trust) -> dict[str, Any]:
    """The configuration in the run directory `folder` without the code that it names.

    A section that is nothing without its code has its defaults. What a section must name stays, such as the file of a
    reward, and what `NamesCode.stays` marks: whoever executes it asks for trust himself. So do settings of a fleet's
    members, which never are read.

    Raises:
        ConfigError: The run's predictions need the code.
    """
    safe_values = deepcopy(dict(values))
    for setting in schema.code(RunConfig, values):
        *above, name = setting.place
        field = setting.section.model_fields[str(name)]
        marks = schema.code_marks(field)
        if setting.of_member or field.is_required() or any(mark.stays for mark in marks):
            continue
        if setting.key == "tta.function" and files.read_json(folder / "decision.json").get("tta") is not None:
            raise refused(folder, f"its predictions need tta.function={setting.value}", trust)
        try:
            own = reduce(getitem, above, cast(Any, safe_values))
        except KeyError:
            continue  # left out with another setting of its section
        whole = above and isinstance(above[-1], str) and _is_valid(setting.section, own)
        for each in (name, *(key for mark in marks for key in mark.beside if key in own)):
            del own[each]
        if whole and not _is_valid(setting.section, own):
            del reduce(getitem, above[:-1], cast(Any, safe_values))[above[-1]]
    return safe_values


def _is_valid(section: type[Section], values: Any) -> bool:
    try:
        section.model_validate(values)
    except ValidationError:
        return False
    return True


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
