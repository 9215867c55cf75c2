"""Arguments that several verbs have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from workbench.cli import completions
from workbench.errors import ConfigError

Recipe = Annotated[
    str,
    typer.Argument(help="A YAML file, or a shipped recipe such as sft/quickstart.", autocompletion=completions.recipes),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="key=value, such as train.epochs=3.", show_default=False, autocompletion=completions.settings),
]
RunSettings = Annotated[
    list[str] | None,
    typer.Argument(
        help="key=value of data or evaluate, such as data.test=FILE or data.columns='{question: asked}'.",
        show_default=False,
        autocompletion=completions.settings,
    ),
]
RunFolder = Annotated[Path, typer.Argument(help="A run directory.", autocompletion=completions.runs)]
Trusted = Annotated[bool, typer.Option("--trust", help="Execute the Python code that the run's config.yaml names.")]


def byte_size(text: str, *, option: str) -> int:
    """Bytes of a size such as 24GB; raises ConfigError for anything else."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise ConfigError(f"{option} {text}: expected a size such as 24GB or 500MiB.") from None


def _show_versions(asked: bool) -> None:
    """One line, from the metadata of what is installed: importing torch takes seconds."""
    if asked:
        from importlib import metadata

        names = ("peft-workbench", "torch", "transformers", "peft")
        typer.echo(", ".join(f"{name} {metadata.version(name)}" for name in names))
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", is_eager=True, callback=_show_versions, help="Versions, and no more.")
]


def weights_of(text: str) -> list[float]:
    """Numbers of `--weights`; raises ConfigError where they are none."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--weights {text}: expected numbers with commas between them, such as 0.5,0.5.") from None
