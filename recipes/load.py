"""From a recipe's name and `key=value` words to a configuration and a place for its run; without torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from workbench import recipes
from workbench.config import DataConfig, RunConfig, load_config
from workbench.errors import ConfigError
from workbench.schema import read_yaml


def load(recipe: RunConfig | Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """The resolved configuration; every mistake of a file is reported at once."""
    if isinstance(recipe, RunConfig):
        if overrides:
            raise ConfigError("Overrides go with a recipe's name or file; a RunConfig is changed with model_copy.")
        return recipe
    path = recipes.find(str(recipe))
    return load_config(path, [*_own_held_out(path, overrides), *overrides])


def _own_held_out(path: Path, overrides: Sequence[str]) -> list[str]:
    """Overrides of held-out and test files, where others replace a recipe's training data.

    A recipe's held-out and test file measure its own task: other training data fall back to a share held out of them.
    """
    given = {word.partition("=")[0] for word in overrides}
    if "data.train" not in given:
        return []
    section = read_yaml(path).get("data") or {}
    fallback = {"held_out": DataConfig.model_fields["held_out"].default, "test": "null"}
    return [
        f"data.{key}={value}"
        for key, value in fallback.items()
        if isinstance(section, dict) and isinstance(section.get(key), str) and f"data.{key}" not in given
    ]


def directory(recipe: RunConfig | Path | str, *, resume: bool) -> Path:
    """`runs/NAME`, or the first free `runs/NAME-2`, ...; to resume, the latest of them."""
    name = recipe.recipe if isinstance(recipe, RunConfig) else str(recipe)
    name = name.removesuffix(".yaml").removesuffix(".yml").replace("/", "-").strip("~.-")
    path, number = Path("runs") / name, 1
    latest = path
    while path.exists():
        latest, number = path, number + 1
        path = latest.with_name(f"{name}-{number}")
    return latest if resume else path
