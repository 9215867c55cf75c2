"""The printed part of verb import."""

from __future__ import annotations

from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from workbench.config.foreign.translation import Translation


def show(translation: Translation, out: Path) -> None:
    """Print what to look at, what has no equivalent, and what comes next."""
    _part("Look at", translation.looks)
    _part("No equivalent", [f"{key}: {value}" for key, value in translation.left.items()])
    if translation.idle:
        typer.echo(fill(f"Decided here, or without effect on what is learnt: {', '.join(translation.idle)}.", 100))
    typer.echo(f"{out} written. Next: workbench check {out}")


def _part(title: str, lines: list[str]) -> None:
    if lines:
        typer.echo(f"{title}:")
        for line in lines:
            typer.echo(fill(line, 100, initial_indent="  - ", subsequent_indent="    "))
