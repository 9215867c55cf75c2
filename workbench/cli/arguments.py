"""Arguments that several verbs have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Recipe = Annotated[str, typer.Argument(help="A YAML file, or a shipped recipe such as sft/quickstart.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value, such as train.epochs=3.", show_default=False)]
RunFolder = Annotated[Path, typer.Argument(help="A run directory.")]
Trusted = Annotated[bool, typer.Option("--trust", help="Execute the Python code that the run's config.yaml names.")]
