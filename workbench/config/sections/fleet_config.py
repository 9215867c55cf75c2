"""The section `fleet`: the runs of many users that train over one backbone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, field_validator

from workbench.config.yaml_text import read_yaml
from workbench.schema import HoldsSettings, Section, Unit


def of_folder(members: Any) -> Any:
    """The settings in a folder of files, by their names; other values as they are."""
    if not isinstance(members, (str, Path)):
        return members
    folder = os.path.expanduser(members)
    return {path.stem: read_yaml(path) for path in sorted(Path(folder).glob("*.yaml"))} if os.path.isdir(folder) else {}


def merged(base: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Sections with other settings written over theirs."""
    both = dict(base)
    for key, value in settings.items():
        inner = both.get(key)
        both[key] = merged(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return both


def nested(settings: Any) -> dict[str, Any]:
    """Settings with dotted keys as sections in each other."""
    result: dict[str, Any] = {}
    for key, value in settings.items() if isinstance(settings, Mapping) else ():
        first, _, rest = str(key).partition(".")
        inner = nested({rest: value}) if rest else nested(value) if isinstance(value, Mapping) else value
        result = merged(result, {first: inner})
    return result


def sections_of(members: Any) -> dict[str, dict[str, Any]]:
    """The sections of each member, from what stands as `fleet.members`."""
    settings = of_folder(members)
    return {str(name): nested(own) for name, own in settings.items()} if isinstance(settings, Mapping) else {}


class FleetConfig(Section):
    """Runs of different users that share a backbone and a process, and nothing else."""

    members: Annotated[dict[str, dict[str, Any]], HoldsSettings(sections_of)] = Field(default_factory=dict)
    """Settings of each member by its name, over those of the recipe: {alice: {data.train: a.jsonl, adapter.rank: 8}}.

    Or a folder with a YAML file of such settings for each member, which is called as the file. Members train in this
    order. To a fleet that is resumed others may be added behind them.
    """
    at_once: Annotated[PositiveInt | Literal["auto"], Unit("members")] = "auto"
    """Members that train at the same time; when one has ended, the next one that waits joins. `auto`: as many as the
    memory of the device holds, by a plan."""

    @field_validator("members", mode="before")
    @classmethod
    def _read(cls, members: Any) -> Any:
        """The settings of a folder of files; names are texts, as YAML makes numbers, dates and truth values of some."""
        settings = of_folder(members)
        if not isinstance(settings, Mapping):
            raise ValueError(
                f"found {members!r}. Write {{alice: {{data.train: alice.jsonl}}}}, or a folder of YAML files."
            )
        for name in settings:
            if not isinstance(name, str):
                raise ValueError(f'YAML takes the name {name} for no text. Write it in quotes: "{name}".')
        if members == {} or settings:
            return settings
        raise ValueError(f"{members} is no folder with YAML files. Write one a member, such as {members}/alice.yaml.")
