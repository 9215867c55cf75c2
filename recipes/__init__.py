"""Flows: what the verbs of the command line do, and the recipes that `run` runs."""

from __future__ import annotations

from pathlib import Path

from workbench.errors import ConfigError
from workbench.runs import files
from workbench.schema import did_you_mean

CONFIGS = Path(__file__).parent / "configs"
SCHEMA = CONFIGS / "recipe.schema.json"
"""The output of `workbench schema`, by which editors complete and check recipes."""
FOR_EDITORS = "# yaml-language-server: $schema="
"""How the line of a recipe begins that names its schema."""


def shipped() -> list[str]:
    """Names of the recipes that come with the package, such as `sft/quickstart`."""
    return sorted(str(path.relative_to(CONFIGS).with_suffix("")) for path in CONFIGS.glob("*/*.yaml"))


def find(recipe: str) -> Path:
    """The YAML file of a path or of a shipped name."""
    path = Path(recipe).expanduser()
    if path.suffix in (".yaml", ".yml"):
        return path
    if recipe not in shipped():
        meant = did_you_mean(recipe, shipped(), shown_by="workbench ls")
        raise ConfigError(f"{recipe}: no such recipe.{meant} A recipe of your own is a file whose name ends in .yaml.")
    return CONFIGS / f"{recipe}.yaml"


def copy(recipe: str, file: Path) -> None:
    """Write a shipped recipe to `file`, which must not exist."""
    source = find(recipe)
    if not source.is_file():
        raise ConfigError(f"{recipe}: no such file. `workbench ls recipes` lists the shipped recipes.")
    if file.exists():
        raise ConfigError(f"{file} exists already. Name another file, or delete it first.")
    text = source.read_text(encoding="utf-8")
    files.write_bytes(file, text.replace(f"{FOR_EDITORS}../{SCHEMA.name}\n", editor_line()).encode())


def editor_line() -> str:
    """The line by which an editor completes and checks a recipe that stands anywhere on this machine."""
    return f"{FOR_EDITORS}{SCHEMA.resolve().as_uri()}\n"
