"""From a recipe's name and `key=value` words to a configuration and a place for its run; without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from workbench import recipes
from workbench.config import DataConfig, RunConfig, load_config
from workbench.config.sections.distill_config import STUDENT, TEACHER
from workbench.config.yaml_text import read_yaml
from workbench.data import hub_datasets
from workbench.data.source_files import data_files, local_path
from workbench.errors import ConfigError
from workbench.models.backbone_source import require_there
from workbench.runs import run_directory

Recipe: TypeAlias = RunConfig | Path | str
"""A configuration, a YAML file, or the name of a shipped recipe such as `sft/quickstart`."""


def load(recipe: Recipe, overrides: Sequence[str] = ()) -> RunConfig:
    """The resolved configuration of a recipe.

    Args:
        recipe: A configuration, a YAML file, or the name of a shipped recipe such as `sft/quickstart`.
        overrides: `key=value` words on top of a file or name.

    Returns:
        The configuration, typed and frozen. `config.model_copy(update={"seed": 1})` is another one.

    Raises:
        ConfigError: No such recipe, or mistakes in it, all of which are told at once.

    Examples:
        >>> import workbench
        >>> config = workbench.load_recipe("sft/quickstart", ["train.epochs=3"])
        >>> config.adapter.method, config.train.epochs
        ('lora', 3.0)
    """
    if isinstance(recipe, RunConfig):
        if overrides:
            raise ConfigError("Overrides go with a recipe's name or file; a RunConfig is changed with model_copy.")
        return recipe
    path = recipes.find(str(recipe))
    return load_config(path, [*_own_data(path, overrides), *_named_sets(path, overrides), *overrides])


def require_found(config: RunConfig) -> None:
    """Refuse rows and a backbone that are nowhere, before torch is imported to read them."""
    if config.model.id not in (TEACHER, STUDENT):
        require_there(config.model)
    data = config.data
    sources = [data.train, *(each.path for each in data.sources.values())]
    for scored in (data.held_out, data.test):
        sources += scored.values() if isinstance(scored, dict) else [scored] if isinstance(scored, str) else []
    sources += [*data.decontaminate.against, data.select.target or ""]
    sources += [config.pseudo_label.unlabelled or "", config.distill.unlabelled or ""]
    for source in filter(None, sources):
        if "://" not in source and not _stands(local_path(source)) and data_files(source) is None:
            hub_datasets.require_reachable(source)


def _stands(path: Path) -> bool:
    """Whether a path is there, or leads into an archive."""
    return path.exists() or any(each.is_file() for each in path.parents)


def _named_sets(path: Path, overrides: Sequence[str]) -> list[str]:
    """Overrides that put sets with names, `data.test.NAME=FILE`, in the place of a recipe's single one."""
    given, sections = {word.partition("=")[0] for word in overrides}, read_yaml(path)
    return [
        f"{key}={{}}"
        for key in ("data.held_out", "data.test")
        if key not in given
        and any(word.startswith(f"{key}.") for word in given)
        and not isinstance(_value(sections, key), dict)
    ]


def _own_data(path: Path, overrides: Sequence[str]) -> list[str]:
    """Overrides of what a recipe says of the rows that come with the package, where others replace its training data.

    Those are an example, and so are their held-out and test files, which measure its own task, their number of rows,
    and rows without labels beside them. A person's own files stay: an override changes what it names.
    """
    given = {word.partition("=")[0] for word in overrides}
    sections = read_yaml(path)
    train, fallback = _value(sections, "data.train"), dict[str, object]()
    if train is not None and any(key == "data.sources" or key.startswith("data.sources.") for key in given):
        fallback["data.train"] = "null"
    elif "data.train" not in given:
        return []
    if isinstance(train, str) and train.startswith("starter/"):
        for key, value in {"data.held_out": DataConfig.model_fields["held_out"].default, "data.test": "null"}.items():
            if isinstance(_value(sections, key), str | dict):
                fallback[key] = value
        example = ("data.limit", "pseudo_label.unlabelled", "distill.unlabelled")
        fallback |= {key: "null" for key in example if _value(sections, key) is not None}
    return [f"{key}={value}" for key, value in fallback.items() if key not in given]


def _value(sections: Mapping[str, object], key: str) -> object:
    section, _, name = key.partition(".")
    values = sections.get(section)
    return values.get(name) if isinstance(values, dict) else None


def directory(recipe: Recipe, *, resume: bool) -> Path:
    """`runs/NAME`, or the first of `runs/NAME-2`, ... that is free or failed at once; to resume, the latest of them."""
    name = recipe.recipe if isinstance(recipe, RunConfig) else str(recipe)
    name = name.removesuffix(".yaml").removesuffix(".yml").replace("/", "-").strip("~.-")
    path, number = Path("runs") / name, 1
    latest = path
    while path.exists() and (resume or not run_directory.failed_at_once(path)):
        latest, number = path, number + 1
        path = latest.with_name(f"{name}-{number}")
    return latest if resume else path
