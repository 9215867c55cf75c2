"""From a recipe's name and `key=value` words to a configuration and a place for its run; without torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from workbench import recipes
from workbench.config import RunConfig, load_config
from workbench.errors import ConfigError


def load(recipe: RunConfig | Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """The resolved configuration; every mistake of a file is reported at once."""
    if isinstance(recipe, RunConfig):
        if overrides:
            raise ConfigError("Overrides go with a recipe's name or file; a RunConfig is changed with model_copy.")
        return recipe
    return load_config(recipes.find(str(recipe)), list(overrides))


def directory(recipe: RunConfig | Path | str, *, resume: bool) -> Path:
    """`runs/NAME`, or the first free `runs/NAME-2`, ...; to resume, the latest of them."""
    name = recipe.recipe if isinstance(recipe, RunConfig) else str(recipe).removesuffix(".yaml").replace("/", "-")
    path, number = Path("runs") / name.strip(".-"), 1
    latest = path
    while path.exists():
        latest, number = path, number + 1
        path = latest.with_name(f"{name.strip('.-')}-{number}")
    return latest if resume else path
