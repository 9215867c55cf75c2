"""The section `fleet`: the runs of many users that train over one backbone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, field_validator

from workbench.config.yaml_text import read_yaml
from workbench.schema import Section, Unit


class FleetConfig(Section):
    """Runs of different users that share a backbone and a process, and nothing else."""

    members: dict[str, dict[str, Any]] = Field(default_factory=dict)
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


def of_folder(members: Any) -> Any:
    """The settings in a folder of files, by their names; other values as they are."""
    if not isinstance(members, (str, Path)):
        return members
    return {path.stem: read_yaml(path) for path in sorted(Path(members).expanduser().glob("*.yaml"))}
