"""Verb init: five questions, and a recipe."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.arguments import byte_size
from workbench.errors import ConfigError
from workbench.runs.process_memory import importing


def init(
    out: Annotated[Path, typer.Argument(help="The recipe to write.")] = Path("my.yaml"),
    rows: Annotated[str | None, typer.Option(help="A file, a folder, or a hub data set.")] = None,
    goal: Annotated[str | None, typer.Option(help="answers, classes, folds, judged, rewards, embeddings ...")] = None,
    model: Annotated[str | None, typer.Option(help="A folder or a hub id; starter: the shipped one.")] = None,
    memory: Annotated[str | None, typer.Option(help="Of the device, such as 24GB; default: what is free here.")] = None,
    time: Annotated[str | None, typer.Option(help="Longest time, such as 90m; default: no limit.")] = None,
) -> None:
    """Ask five questions, and write a recipe that will fit. Rows and machine are looked at."""
    asks = sys.stdin.isatty()
    if rows is None:
        if not asks:
            raise ConfigError("--rows: which rows to learn from? Write --rows FILE, a folder, or a hub data set.")
        rows = str(typer.prompt("Rows to learn from (a file, a folder, or a hub data set)"))
    with importing():
        from workbench.recipes.first_recipe import GOALS, Wishes, suggested, write

    if goal is None:
        goal = suggested(rows)
        if asks:
            for name, each in GOALS.items():
                typer.echo(f"  {name:14} {each.says}")
            goal = str(typer.prompt("What is to be learnt", default=goal))
    model = model or _asked("Backbone (a folder or a hub id)", GOALS[goal].model if goal in GOALS else "", asks=asks)
    memory = memory or _asked(
        "Memory of the device (such as 24GB; here: what is free on this machine)", "here", asks=asks
    )
    time = time or _asked("Longest time (such as 90m; none: no limit)", "none", asks=asks)
    size = None if memory == "here" else byte_size(memory, option="--memory")
    summary = write(Wishes(rows, goal, model, size, None if time == "none" else time), out)
    typer.echo(f"{out} written: {summary}.\nNext: workbench check {out}, then: workbench run {out}")


def _asked(question: str, default: str, *, asks: bool) -> str:
    return str(typer.prompt(question, default=default)) if asks else default
