"""Flows: what the verbs of the command line do, and the recipes that `run` runs."""

from __future__ import annotations

from pathlib import Path

from workbench.errors import ConfigError
from workbench.schema import did_you_mean

CONFIGS = Path(__file__).parent / "configs"


def shipped() -> list[str]:
    """Names of the recipes that come with the package, such as `sft/quickstart`."""
    return sorted(str(path.relative_to(CONFIGS).with_suffix("")) for path in CONFIGS.glob("*/*.yaml"))


def find(recipe: str) -> Path:
    """The YAML file of a path or of a shipped name."""
    path = Path(recipe).expanduser()
    if path.suffix in (".yaml", ".yml"):
        return path
    if recipe not in shipped():
        raise ConfigError(f"{recipe}: no such recipe.{did_you_mean(recipe, shipped())} A file's name ends in .yaml.")
    return CONFIGS / f"{recipe}.yaml"


def copy(recipe: str, file: Path) -> None:
    """Write a shipped recipe to `file`, which must not exist."""
    source = find(recipe)
    if file.exists():
        raise ConfigError(f"{file} exists already. Name another file, or delete it first.")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written ({error.strerror}).") from None
