"""The configuration of a run: its sections, and that they go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import model_validator

from workbench.adapters import Method
from workbench.config import plugins
from workbench.config.checks import cross_checks, packing_checks, streaming_checks
from workbench.config.expansions import fleet_expansion, search_expansion
from workbench.config.expansions.distill_expansion import as_plain_run
from workbench.config.expansions.sweep_expansion import trials
from workbench.config.freeze_config import FreezeConfig
from workbench.config.sections.run_sections import RunSections
from workbench.config.yaml_text import override, read_yaml
from workbench.schema import parse


class RunConfig(RunSections):
    """Everything that a run depends on; a run is a pure function of it."""

    @model_validator(mode="before")
    @classmethod
    def _rows_of_members(cls, values: Any) -> Any:
        return (
            fleet_expansion.with_rows(values)
            if isinstance(values, dict) and values.get("recipe") == "fleet"
            else values
        )

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        mistakes = [*packing_checks.mistakes(self), *streaming_checks.mistakes(self)]
        if self.recipe == "sweep" and not mistakes:
            trials(self)  # each member is judged as the run that it is
            return self
        if self.recipe == "search" and not mistakes:
            search_expansion.ends(self)
            return self
        if self.recipe == "fleet" and not mistakes:
            fleet_expansion.trials(self)
            return self
        if self.recipe == "distill" and not mistakes:
            as_plain_run(self)
            return self
        if mistakes := [*mistakes, *cross_checks.mistakes(self)]:
            raise ValueError(" ".join(mistakes))
        return self


def load_config(recipe: str | Path, overrides: tuple[str, ...] | list[str] = ()) -> RunConfig:
    """The resolved configuration of a YAML file; raises ConfigError with every mistake at once.

    Where an override names another adapter method or policy of freezing, the file's settings that it does not have are
    left out.
    """
    path = Path(recipe)
    values = read_yaml(path)
    given = override({}, overrides)
    if isinstance(given.get("plugins"), list):
        plugins.load(given["plugins"])
    for name, choice, base in (("adapter", "method", Method), ("freeze", "policy", FreezeConfig)):
        wanted, written = given.get(name), values.get(name)
        if isinstance(wanted, dict) and choice in wanted and isinstance(written, dict):
            known = base.section_for(wanted).model_fields
            values[name] = {key: value for key, value in written.items() if key in known}
    return parse(RunConfig, override(values, overrides), source=path.name)
