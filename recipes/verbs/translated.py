"""Verb import: a configuration file of another tool as a recipe, with what could not be taken over."""

from __future__ import annotations

from pathlib import Path

from workbench.config import RunConfig
from workbench.config.foreign import axolotl, llamafactory
from workbench.config.foreign.translation import Translation, printable
from workbench.config.yaml_text import dump_yaml, read_yaml
from workbench.errors import ConfigError
from workbench.recipes import editor_line
from workbench.runs import files
from workbench.schema import parse


def write(source: Path, out: Path) -> Translation:
    """Write the recipe of Axolotl's or LLaMA-Factory's file `source` to `out`, which must not exist.

    Raises:
        ConfigError: It is no such file, its task has no equivalent, a value is not what its key takes, or `out` exists.
    """
    try:
        if out.exists():
            raise ConfigError(f"{out} exists already. Name another file with --out, or delete it first.")
    except OSError as error:
        raise ConfigError(f"--out {str(out)[:200]}: {error.strerror}. Name another file.") from None
    settings = read_yaml(source)
    try:
        if "base_model" in settings:
            translation = axolotl.translate(settings)
        elif "model_name_or_path" in settings:
            translation = llamafactory.translate(settings, folders=(source.parent, Path()))
        else:
            if {"model", "train_dataset"} <= settings.keys():
                raise ConfigError(
                    "This is a file of LLaMA-Factory's v1; only those with model_name_or_path and stage are read."
                )
            raise ConfigError(
                "It has neither base_model (Axolotl) nor model_name_or_path (LLaMA-Factory), by which such files are "
                "known."
            )
        parse(RunConfig, translation.recipe, source=f"the recipe of {source}")
    except ConfigError as error:
        raise ConfigError(f"{source} has no equivalent as it stands. {error}") from None
    files.write_bytes(out, text(translation, source, out).encode())
    return translation


def text(translation: Translation, source: Path, out: Path) -> str:
    """The recipe, below comments that say what to look at."""
    lines = [printable(f"workbench check {out}"), printable(f"From {source}.")]
    for title, parts in translation.report().items():
        lines += [f"{title}:", *(f"- {part}" for part in parts)]
    return "".join(f"# {line}\n" for line in lines) + editor_line() + dump_yaml(translation.recipe)
