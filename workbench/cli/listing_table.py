"""Tables of `workbench ls recipes` and `workbench ls runs`. Without torch, whose import takes seconds."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from workbench.errors import ConfigError
from workbench.recipes import CONFIGS, FOR_EDITORS, shipped
from workbench.runs.files import read_json

_out = Console(highlight=False, soft_wrap=False)


def show(what: str, folder: Path) -> None:
    """Shipped recipes, or runs."""
    if what == "recipes":
        table = Table("recipe", "what it says of itself")
        for name in shipped():
            lines = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
            comments = [line for line in lines if line.startswith("#") and not line.startswith(FOR_EDITORS)]
            table.add_row(name, Text("\n".join(line.lstrip("# ") for line in comments)))
    elif what == "runs":
        table = Table("run", "status", "held-out loss before", "after")
        for path in sorted(folder.glob("*/manifest.json")):
            run_scores = read_json(path.parent / "scores.json")
            losses = (f"{run_scores[when]['loss']:.4f}" if when in run_scores else "" for when in ("before", "after"))
            table.add_row(Text(str(path.parent)), read_json(path).get("status", ""), *losses)
    else:
        raise ConfigError(f"ls {what}: expected recipes, adapters or runs.")
    _out.print(table)
