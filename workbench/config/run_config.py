"""The configuration of a run: its sections, and that they go together."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from pydantic import model_validator
from pydantic.fields import FieldInfo

from workbench import bounds
from workbench.adapters import Method
from workbench.config import plugins, task_facts
from workbench.config.checks import cross_checks, packing_checks, parallelism_checks, row_checks
from workbench.config.expansions import sweep_expansion
from workbench.config.freeze_config import FreezeConfig
from workbench.config.sections.run_sections import RunSections
from workbench.config.task_facts import TaskFacts
from workbench.config.yaml_text import override, read_yaml
from workbench.schema import Mistakes, parse


class RunConfig(RunSections):
    """Everything that a run depends on; a run is a pure function of it."""

    @classmethod
    def model_validate(cls, obj: Any, **settings: Any) -> Self:
        """Plugins run first: the methods, tasks and sections that they add are part of what is read."""
        plugins.load(obj.get("plugins") if isinstance(obj, dict) else None)
        return super().model_validate(obj, **settings)

    @model_validator(mode="before")
    @classmethod
    def _of_files_that_end(cls, values: Any) -> Any:
        if places := list(_endless(values)):
            why = "is a pipe or a device, which has no end. Write it to a file."
            raise Mistakes([(place, f"{path} {why}") for place, path in places])
        return values

    @model_validator(mode="before")
    @classmethod
    def _completed(cls, values: Any) -> Any:
        """Values that follow from those of members, which a recipe over tasks may need."""
        over = task_facts.OVER.get(str(values.get("recipe"))) if isinstance(values, dict) else None
        return values if over is None or over.completed is None else over.completed(values)

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if mistakes := list(_of_names(self)):
            raise ValueError(" ".join(mistakes))
        mistakes = [*packing_checks.mistakes(self), *row_checks.of_streaming(self)]
        mistakes += parallelism_checks.of_recipes(self)
        if self.has_members and not mistakes:
            assert self.over is not None and self.over.members is not None
            self.over.members(self)  # each is judged as the run that it is
        elif self.crossvalidates and self.sweep.over and not mistakes:
            sweep_expansion.banks(self)
        elif mistakes := [*mistakes, *cross_checks.mistakes(self)]:
            raise ValueError(" ".join(mistakes))
        return self


def _endless(values: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield place and path of each text that names a file without an end."""
    if isinstance(values, str | Path) and bounds.is_endless(os.path.expanduser(values)):
        yield place, str(values)
    listed = enumerate(values) if isinstance(values, list | tuple) else ()
    for key, value in values.items() if isinstance(values, dict) else listed:
        yield from _endless(value, f"{place}.{key}" if place else str(key))


def _of_names(config: RunConfig) -> Iterator[str]:
    if config.over is None:
        if config.of is not None:
            yield (
                f"of={config.of} names the task of recipe={'|'.join(task_facts.OVER)}; recipe={config.recipe} is a "
                "task itself. Leave of out."
            )
    elif reason := config.over.able(config.task):
        yield f"recipe={config.recipe} does not take of={config.task.name}: {reason}"
    elif config.task.views and config.tta.views and "tta" not in config.over.sections:
        yield (
            f"tta: recipe={config.recipe} compares runs by the rows that would choose their views. Leave tta out, and "
            f"train what you choose by recipe={config.task.name} with it."
        )
    elif (start := config.task.start) and config.over.fresh and getattr(config, start).start is not None:
        yield f"{start}.start: recipe={config.recipe} {config.over.fresh}. Leave {start}.start out."


def accept(facts: TaskFacts) -> None:
    """Give every configuration the section that a task declares for itself."""
    if facts.section is not None and facts.name not in RunConfig.model_fields:
        field = FieldInfo.from_annotated_attribute(facts.section, facts.section())
        RunConfig.__pydantic_fields__[facts.name] = field
        RunConfig.model_rebuild(force=True)


def load_config(recipe: str | Path, overrides: tuple[str, ...] | list[str] = ()) -> RunConfig:
    """The resolved configuration of a YAML file; raises ConfigError with every mistake at once.

    Where an override names another adapter method or policy of freezing, the file's settings that it does not have are
    left out.
    """
    path = Path(recipe)
    values = read_yaml(path)
    given = override({}, overrides)
    plugins.load(given.get("plugins"))
    if "recipe" in given and "of" not in given:
        over, before = task_facts.OVER.get(str(given["recipe"])), task_facts.task_of(values)
        values["of"] = None if over is None or before is None else (before.name if over.able(before) is None else None)
    for name, choice, base in (("adapter", "method", Method), ("freeze", "policy", FreezeConfig)):
        wanted, written = given.get(name), values.get(name)
        if isinstance(wanted, dict) and choice in wanted and isinstance(written, dict):
            known = base.section_for(wanted).model_fields
            values[name] = {key: value for key, value in written.items() if key in known}
    return parse(RunConfig, override(values, overrides), source=path.name)
