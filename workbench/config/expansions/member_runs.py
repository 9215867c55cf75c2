"""Members of a sweep or search: each is a run, whose settings are written over those that all have in common."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import reduce
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from workbench.config.expansions import member_keys
from workbench.config.sections.run_sections import RunSections
from workbench.config.sections.sweep_config import shown
from workbench.schema import Mistakes, explain

Run = TypeVar("Run", bound=RunSections)

LONGEST_NAME = 100
"""Characters of a folder's name."""


@dataclass(frozen=True)
class Trial(Generic[Run]):
    """One combination of values, and the run that it is."""

    name: str
    """Name of its folder: learning_rate=0.001,seed=0."""
    settings: Mapping[str, Any]
    """The value of each key that members differ in."""
    config: Run
    number: int
    """Its place among all members, from 0."""


def trials(
    config: Run, base: Mapping[str, Any], names: Sequence[str], wanted: Sequence[Mapping[str, Any]], *, section: str
) -> list[Trial[Run]]:
    """The run of each combination of settings.

    Args:
        base: Values of the run that all have in common.
        names: One for each.
        section: Place of the settings in the recipe, such as sweep.over.

    Raises:
        Mistakes: all that is wrong with any of them.
    """
    members, mistakes = [], dict[tuple[str, str], list[str]]()
    for number, (name, settings) in enumerate(zip(names, wanted, strict=True)):
        values = written(base, settings)
        try:
            run = type(config).model_validate(values)
        except ValidationError as error:
            for mistake in explain(type(config), values, error):
                mistakes.setdefault(mistake, []).append(name)
        else:
            members.append(Trial(name, {key: resolved(run, key) for key in settings}, run, number))
    keys = {key for settings in wanted for key in settings}
    require([_mistake(*mistake, names, len(wanted), keys, section) for mistake, names in mistakes.items()])
    return members


def _mistake(place: str, text: str, names: list[str], members: int, keys: set[str], section: str) -> tuple[str, str]:
    """A mistake of some members; a value of theirs is named by its place in the recipe."""
    if place in keys:
        return f"{section}.{place}", text
    if len(names) == members:
        return place, text
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return place, f"{text} (member {names[0]}{more})"


def require(mistakes: list[tuple[str, str]]) -> None:
    """Raise Mistakes where there are any."""
    if mistakes:
        raise Mistakes(mistakes)


def written(values: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with each key of `settings` in its section; a method's section has the keys of that method."""
    result = deepcopy(dict(values))
    if member_keys.METHOD in settings:
        result["adapter"] = member_keys.of_method(result.get("adapter") or {}, settings[member_keys.METHOD])
    for key, value in settings.items():
        *sections, last = key.split(".")
        reduce(lambda inner, name: inner.setdefault(name, {}), sections, result)[last] = value
    return result


def resolved(run: RunSections, key: str) -> Any:
    """The value of a key in a run."""
    return reduce(lambda inner, name: inner[name], key.split("."), run.model_dump(mode="json"))


def folder_name(settings: Mapping[str, Any]) -> str:
    """A folder's name; keys by their last part where that is enough."""
    lasts = [key.rpartition(".")[2] for key in settings]
    keys = lasts if len(set(lasts)) == len(lasts) else list(settings)
    name = ",".join(f"{key}={shown(value)}" for key, value in zip(keys, settings.values(), strict=True))
    return re.sub(r"[^\w.,=+-]", "_", name)[:LONGEST_NAME]


def sharing_refusal(config: RunSections, recipe: str) -> str | None:
    """Why devices cannot share the backbone of all members; None where they can, or each holds all of it.

    Args:
        recipe: With its article.
    """
    if not config.distributed.sharded or config.distributed.engine == "fsdp2":
        return None
    return (
        f"{recipe} trains its members in one bank, each with an optimizer of its own, and DeepSpeed steps one. Write "
        "distributed={engine: fsdp2, zero: 3}, or leave it out."
    )
