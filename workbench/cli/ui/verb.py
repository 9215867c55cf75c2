"""The verb `ui`."""

from __future__ import annotations

import secrets
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from workbench.errors import ConfigError

_DEFAULT = Path("runs")


def ui(
    folder: Annotated[Path, typer.Argument(help="Where runs stand.")] = _DEFAULT,
    host: Annotated[str, typer.Option(help="Address to listen at; others than this machine's own need a token.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8765,
    token: Annotated[
        str | None,
        typer.Option(envvar="WORKBENCH_UI_TOKEN", show_envvar=True, help="Opens what writes; default: a new one."),
    ] = None,
) -> None:
    """Show the runs of a folder in a browser. While they train, too; start, stop, compare and ask them there."""
    if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        raise ConfigError(f"ui needs {', '.join(missing)}. Install them: pip install 'peft-workbench[serve]'")
    if (folder / "manifest.json").is_file():
        raise ConfigError(f"{folder} is a run. Name the folder that it stands in: workbench ui {folder.parent}")
    if not folder.is_dir() and folder != _DEFAULT:
        raise ConfigError(f"{folder}: no such folder. Name the one in which runs stand, or make it first.")
    from workbench.cli.ui.guards import Access
    from workbench.cli.ui.page_app import Page
    from workbench.runs.http_server import Address, serve

    access = Access(token or secrets.token_urlsafe(16), host)
    if not access.is_local and not token:
        raise ConfigError(
            f"--host {host} lets others in, who could start programs here. Set WORKBENCH_UI_TOKEN (or --token) to "
            "a long secret, which they then need for everything; the connection is not encrypted."
        )

    def ready(address: str) -> None:
        typer.echo(f"{address}/#token={access.token}")
        typer.echo(f"shows {folder}. Stop it with Ctrl-C; a run that it started goes on.")

    with Address(host, port).bound() as listening:
        serve(Page(folder, access).app, listening, grace=10, ready=ready)
